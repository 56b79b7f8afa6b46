"""A replay fails while a preemption brings working slots up to date: nobody runs on a state that was not written."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_runtime import SamplingParams
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.scheduling.request import Request
from tests.speculative.speculative_runs import KINDS, plain, random_prompts, scripted, speculating

PROMPTS = random_prompts(1, (5, 9, 3, 7))
PARAMS = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)
TIGHT: dict[str, Any] = {"max_model_len": 40, "num_kv_slots": 60, "num_state_slots": 8, "max_num_seqs": 4}


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_failed_catch_up_go_back_to_the_queue(name: str, failing: int) -> None:
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, PARAMS)
    with speculating(name, scripted(expected, seed=3), "replay", **TIGHT) as rt:
        scheduler, steps = rt._engine.scheduler, rt._engine.runner.steps
        real_preempt, real_commit = scheduler.preempt, steps.commit
        is_preempting, num_commits = False, 0

        def preempt(request: Request) -> None:
            nonlocal is_preempting
            is_preempting = True
            try:
                real_preempt(request)
            finally:
                is_preempting = False

        def commit(inputs: CommitInputs) -> None:
            nonlocal num_commits
            num_commits += is_preempting
            if is_preempting and num_commits == failing:
                raise RuntimeError("planted")
            real_commit(inputs)

        scheduler.preempt, steps.commit = preempt, commit  # type: ignore[method-assign]
        outputs = rt.generate(PROMPTS, PARAMS)
    assert num_commits >= failing
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]

"""States that cannot be written behind accepted drafts: nobody runs on them, and nobody tries again for ever."""

from __future__ import annotations

import pytest

from hybrid_runtime import SamplingParams
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.scheduling.request import MAX_LOST_STATES, Request
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle
from tests.speculative.speculative_runs import KINDS, ROLLBACKS, plain, random_prompts, scripted, speculating

PROMPTS = random_prompts(1, (5, 9, 3, 7))
PARAMS = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)
models = pytest.mark.parametrize(("name", "rollback"), list(zip(KINDS, ROLLBACKS, strict=True)))


def fail(inputs: CommitInputs) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_replay_that_fails_while_another_request_moves_out(name: str, failing: int) -> None:
    """Those whose states were to be written with it go back to the queue."""
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (18, 4, 9, 14)]
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, params)
    with speculating(name, scripted(expected, seed=3), "replay") as rt:
        residency, steps = rt._engine.scheduler.residency, rt._engine.runner.steps
        real_donate, real_commit = residency.donate, steps.commit
        is_moving, num_commits = False, 0

        def donate(request: Request, origin: str) -> None:
            nonlocal is_moving
            is_moving = True
            try:
                real_donate(request, origin)
            finally:
                is_moving = False

        def commit(inputs: CommitInputs) -> None:
            nonlocal num_commits
            num_commits += is_moving
            if is_moving and num_commits == failing:
                raise RuntimeError("planted")
            real_commit(inputs)

        residency.donate, steps.commit = donate, commit  # type: ignore[method-assign]
        outputs = rt.generate(PROMPTS, params)
        assert_content(rt)
        assert_idle(rt)
    assert num_commits >= failing
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


@models
@pytest.mark.parametrize("num_requests", [1, 4])
def test_who_loses_its_states_again_and_again_decodes_plainly(
    name: str, rollback: str, num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = PROMPTS[:num_requests]
    with plain(name) as rt:
        expected = rt.generate(prompts, PARAMS)
    with speculating(name, scripted(expected, seed=3), rollback) as rt:
        rt._engine.runner.steps.commit = fail  # type: ignore[method-assign]
        outputs = rt.generate(prompts, PARAMS)
        stats = rt.stats()
        assert stats.speculation is not None
        assert stats.speculation.num_failed_commits == rt._engine.runner.num_verify_forwards
        # Each loss costs no more than to compute once more what there is; the last token is never computed.
        assert stats.scheduler.num_prefill_tokens + stats.scheduler.num_decode_tokens <= sum(
            (1 + MAX_LOST_STATES) * (len(prompt) + 17) for prompt in prompts
        )
        assert_content(rt)
        assert_idle(rt)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [output.metrics.num_lost_states for output in outputs] == [MAX_LOST_STATES] * num_requests
    levels = [record.levelname for record in caplog.records]
    assert levels.count("ERROR") == 1, "the cause is logged once"
    assert levels.count("WARNING") == num_requests, "and of each request once that it stops"


@models
def test_a_loss_that_is_not_repeated_does_not_end_speculation(name: str, rollback: str) -> None:
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, PARAMS)
    with speculating(name, scripted(expected, seed=3), rollback) as rt:
        steps = rt._engine.runner.steps
        real, calls = steps.commit, iter(range(10**6))
        steps.commit = lambda inputs: fail(inputs) if next(calls) == 1 else real(inputs)  # type: ignore[method-assign]
        outputs = rt.generate(PROMPTS, PARAMS)
        speculation = rt.stats().speculation
        assert speculation is not None
        assert speculation.num_failed_commits == 1
        assert rt._engine.runner.num_verify_forwards > 1 + MAX_LOST_STATES
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert {output.metrics.num_lost_states for output in outputs} <= {0, 1}

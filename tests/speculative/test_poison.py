"""A rejected token leaves no trace: what only it wrote may be NaN, and so may what nobody owns or nothing may read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from hybrid_runtime.engine.commits import Commit
from hybrid_runtime.models.hybrid_model import HybridModel
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle, poison_free_slots
from tests.speculative.scripted_drafter import PARTLY, RIGHT, TWINS, WRONG
from tests.speculative.speculative_runs import (
    KINDS,
    MIXED,
    MIXED_LENGTHS,
    ROLLBACKS,
    ROOMY,
    TIGHT,
    config,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    scripted,
    speculating,
    wide_model,
)

PROMPTS = random_prompts(41, MIXED_LENGTHS)


def poison_rejected(rt: HybridRuntime, batch: Any, commits: Sequence[Commit]) -> int:
    """NaN to the records of all rows, as far as no commit will read them. Returns how many rejected nodes there were.

    The KV slots of these are free already.
    """
    memory = rt._engine.memory
    for layer in memory.step_memory.record_layers:
        for name, record in layer.items():
            kept = record.clone()
            record.fill_(torch.nan)
            record[0] = kept[0]  # padding rows read it
            if rt._engine.runner.commits._is_lazy and name != "node_states":
                for commit in commits:
                    nodes = torch.from_numpy(commit.nodes)
                    record[commit.request_row, nodes] = kept[commit.request_row, nodes]
    return sum(1 + row.num_drafted - len(row.nodes) for row in batch.rows)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("name", KINDS)
def test_nan_in_all_that_was_rejected_changes_no_text(name: str, rollback: str) -> None:
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, list(MIXED))
    drafter = scripted(expected, seed=6, kinds=(RIGHT, WRONG, PARTLY, TWINS))
    num_rejected = 0
    with speculating(name, drafter, rollback, **TIGHT) as rt:
        runner, commit = rt._engine.runner, rt._engine.runner.commit

        def commit_and_poison(batch: Any, commits: Sequence[Commit]) -> None:
            nonlocal num_rejected
            commit(batch, commits)
            num_rejected += poison_rejected(rt, batch, commits)

        runner.commit = commit_and_poison  # type: ignore[method-assign]
        ids = [rt.add_request(prompt, params) for prompt, params in zip(PROMPTS, MIXED, strict=True)]
        found: dict[str, RequestOutput] = {}
        while rt.has_unfinished:
            poison_free_slots(rt)
            found |= {output.request_id: output for output in rt.step()}
        assert outcomes([found[request_id] for request_id in ids]) == outcomes(expected)
        assert num_accepted(rt) > 10
        assert num_rejected > 10
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize(("name", "rollback"), list(zip(KINDS, ROLLBACKS, strict=True)))
def test_nan_logits_of_a_rejected_node_end_nothing(name: str, rollback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that overflows is no fault of the text that goes on without it."""
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, list(MIXED))
    real = HybridModel.verify_stream

    def spoilt(self: Any, inputs: Any, *args: Any) -> torch.Tensor:
        x_ND = real(self, inputs, *args)
        last = torch.arange(inputs.num_nodes - 1, len(x_ND), inputs.num_nodes)
        x_ND[last] = torch.nan
        return x_ND

    drafter = scripted(expected, seed=6, kinds=(WRONG,))  # the last node is never accepted
    with speculating(name, drafter, rollback) as rt:
        monkeypatch.setattr(HybridModel, "verify_stream", spoilt)
        found = rt.generate(PROMPTS[:1], list(MIXED[:1]))
        assert outcomes(found) == outcomes(expected[:1])
        assert_idle(rt)


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_tokens_before_nan_logits_are_delivered(rollback: str) -> None:
    """Plain decoding delivers a token and then finds that no number follows from it."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with plain("kimi") as rt:
        truth = rt.generate(PROMPTS, params)
    fatal = truth[0].outputs[0].token_ids[6]
    model: Any = copy.deepcopy(wide_model("kimi"))
    model.get_input_embeddings().weight.data[fatal] = torch.nan
    with HybridRuntime(model, **{**ROOMY, "enable_prefix_cache": False}) as rt:
        expected = rt.generate(PROMPTS, params)
    assert expected[0].outputs[0].finish_reason == "error"
    assert len(expected[0].outputs[0].token_ids) > 3
    drafter = scripted(truth, kinds=(RIGHT,), shape="chain")
    with HybridRuntime(model, drafter=drafter, **{**ROOMY, "speculative": config(rollback)}) as rt:
        assert outcomes(rt.generate(PROMPTS, params)) == outcomes(expected)
        assert num_accepted(rt) > 10
        assert_idle(rt)

"""What drafts may not exceed, what bad drafters may not cost, and what records take of the memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from hybrid_runtime.speculative.draft import Draft, DraftRow
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle
from tests.speculative.scripted_drafter import RIGHT, WRONG, ScriptedDrafter
from tests.speculative.speculative_runs import (
    KINDS,
    ROLLBACKS,
    TIGHT,
    TREE_SIZE,
    config,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    scripted,
    speculating,
    texts_of,
    wide_model,
)

NAME = KINDS[1]
PROMPTS = random_prompts(51, [6, 9, 3])
LONG = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def truth() -> list[RequestOutput]:
    with plain(NAME) as rt:
        return rt.generate(PROMPTS, LONG)


# Limits.


@pytest.mark.parametrize("max_tokens", [2, 3, 9, 20])
def test_no_draft_is_longer_than_what_the_output_may_grow_by(max_tokens: int, truth: list[RequestOutput]) -> None:
    """The last token that is emitted is never a node."""
    drafter = scripted(truth, kinds=(RIGHT,))
    lengths = [len(prompt) + max_tokens for prompt in PROMPTS]
    with speculating(NAME, drafter, max_model_len=25) as rt:
        rt.generate(PROMPTS, dataclasses.replace(LONG, max_tokens=max_tokens))
        assert rt.stats().speculation is not None
    limits = {row: min(25, length) for row, length in enumerate(lengths, start=1)}
    assert bool(drafter.asked) == (max_tokens > 2)  # nobody is asked where nobody may draft
    for row, num_tokens, max_nodes in drafter.asked:
        assert max_nodes == max(0, min(TREE_SIZE - 1, limits[row] - num_tokens - 1))


def test_drafts_take_only_kv_slots_that_nobody_else_has(truth: list[RequestOutput], monkeypatch: Any) -> None:
    """Drafts alone never preempt anybody; a draft is cut to what the pool can give, and nothing is taken beyond."""
    from hybrid_runtime.scheduling.drafting import Drafting

    real, num_cut = Drafting._within_slots, 0

    def watched(self: Drafting, drafts: Mapping[Any, Draft]) -> Mapping[Any, Draft]:
        nonlocal num_cut
        supply = self.residency.supply
        before = supply.kv.num_free + supply.cache.num_evictable_kv
        cut = real(self, drafts)
        assert sum(map(len, cut.values())) == min(before, sum(map(len, drafts.values())))
        for request, draft in cut.items():
            assert request.resident.num_kv_slots == request.num_tokens + len(draft)
            num_cut += len(draft) < len(drafts[request])
        return cut

    monkeypatch.setattr(Drafting, "_within_slots", watched)
    with speculating(NAME, scripted(truth, kinds=(RIGHT,)), **{**TIGHT, "num_kv_slots": 40}) as rt:
        assert outcomes(rt.generate(PROMPTS, LONG)) == outcomes(truth)
        assert_content(rt)
        assert_idle(rt)
    assert num_cut > 0


def test_rejected_drafts_keep_nobody_waiting(truth: list[RequestOutput]) -> None:
    """Two fit in only as long as neither holds more than its text: 14 and 16 slots when the second ends. A third waits
    until then, and no longer.
    """
    counts = (20, 8, 4)
    params = [dataclasses.replace(LONG, max_tokens=count) for count in counts]
    options: dict[str, Any] = {"num_kv_slots": 31, "max_model_len": 30, "enable_prefix_cache": False}
    num_steps = []
    for drafter in (None, scripted(truth, kinds=(WRONG,))):
        make = plain(NAME, **options) if drafter is None else speculating(NAME, drafter, **options)
        with make as rt:
            ids = [rt.add_request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
            found: dict[str, RequestOutput] = {}
            while rt.has_unfinished:
                found |= {output.request_id: output for output in rt.step()}
                for request in rt._engine.scheduler.running:
                    assert request.resident.num_kv_slots <= request.num_tokens
            for request_id, expected, count in zip(ids, truth, counts, strict=True):
                assert found[request_id].outputs[0].token_ids == expected.outputs[0].token_ids[:count]
            stats = rt.stats()
            assert stats.scheduler.num_preemptions == 0
            assert drafter is None or (stats.speculation and stats.speculation.num_drafted_tokens > 20)
            num_steps.append(stats.scheduler.num_steps)
            assert_idle(rt)
    assert num_steps[0] == num_steps[1]


# Bad drafters.


class Once:
    """Goes wrong at every second call; else as another drafter."""

    def __init__(self, inner: ScriptedDrafter, wrong: Callable[[Sequence[DraftRow]], Any]) -> None:
        self._inner = inner
        self._wrong = wrong
        self._num_calls = 0

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self._num_calls += 1
        return self._wrong(rows) if self._num_calls % 2 else self._inner.draft(rows)


def _fail(rows: Sequence[DraftRow]) -> Any:
    raise ZeroDivisionError("planted")


def _overwrite(rows: Sequence[DraftRow]) -> Any:
    for row in rows:
        row.tokens[:] = 5
    return [Draft.chain([5])] * len(rows)


def _int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


_floats: Any = np.ones(1)
NONSENSE: dict[str, Callable[[Sequence[DraftRow]], Any]] = {
    "raises": _fail,
    "returns None": lambda rows: None,
    "too few": lambda rows: [],
    "no drafts": lambda rows: [5] * len(rows),
    "too long": lambda rows: [Draft.chain([5] * (row.max_nodes + 1)) for row in rows],
    "unknown tokens": lambda rows: [Draft.chain([10**6])] * len(rows),
    "negative tokens": lambda rows: [Draft.chain([-1])] * len(rows),
    "a parent behind its child": lambda rows: [Draft(_int32(5, 6), _int32(0, 2))] * len(rows),
    "floats": lambda rows: [Draft(_floats, _int32(0))] * len(rows),
    "overwrites the tokens": _overwrite,
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_bad_drafter_costs_no_request_anything(kind: str, truth: list[RequestOutput]) -> None:
    drafter = Once(scripted(truth, kinds=(RIGHT,)), NONSENSE[kind])
    with speculating(NAME, drafter) as rt:
        assert outcomes(rt.generate(PROMPTS, LONG)) == outcomes(truth)
        stats = rt.stats().speculation
        assert stats is not None
        assert stats.num_failed_drafts > 1
        assert stats.num_accepted_tokens > 5
        assert_content(rt)
        assert_idle(rt)


# Drafting less.


def test_a_request_whose_drafts_fail_drafts_less_and_says_so(truth: list[RequestOutput]) -> None:
    """Beside one whose drafts are right, which goes on as before."""

    class Both:
        def __init__(self) -> None:
            first, second = texts_of(truth[:2])
            self.right = ScriptedDrafter([first], kinds=(RIGHT,))
            self.wrong = ScriptedDrafter([second], kinds=(WRONG,))

        def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
            is_first = [row.tokens[: len(PROMPTS[0])].tolist() == PROMPTS[0] for row in rows]
            return [
                (self.right if first else self.wrong).draft([row])[0] for row, first in zip(rows, is_first, strict=True)
            ]

    metrics = {}
    for adaptive in (True, False):
        drafter = Both()
        with speculating(NAME, drafter, adaptive=adaptive) as rt:
            outputs = rt.generate(PROMPTS[:2], LONG)
            assert outcomes(outputs) == outcomes(truth[:2])
            metrics[adaptive] = [output.metrics for output in outputs]
            speculation = rt.stats().speculation
            assert speculation is not None
            assert speculation.num_drafted_tokens == sum(m.num_drafted_tokens for m in metrics[adaptive])
            assert num_accepted(rt) == sum(m.num_accepted_tokens for m in metrics[adaptive])
    right, wrong = metrics[True]
    assert wrong.num_accepted_tokens == 0
    assert wrong.num_draft_rounds == 7  # two at each of the limits 7, 3 and 1; after a pause one more
    assert wrong.num_drafted_tokens < metrics[False][1].num_drafted_tokens
    assert right.num_accepted_tokens == right.num_drafted_tokens > 10


# Memory.


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_records_are_counted_and_named_in_a_refusal(rollback: str) -> None:
    with speculating(NAME, None, rollback) as rt:
        stats = rt.stats().speculation
        assert stats is not None
        records = {id(t): t for layer in rt._engine.memory.step_memory.record_layers for t in layer.values()}
        assert stats.record_bytes == sum(t.numel() * t.itemsize for t in records.values()) > 0
        assert rt.plan.record_bytes == stats.record_bytes
        message = f"{stats.record_bytes:,} B of speculation records = {rt.plan.num_bytes:,} B"
        num_bytes = rt.plan.num_bytes
    speculating(NAME, None, rollback, memory_bytes=num_bytes).close()
    with pytest.raises(ValueError, match=re.escape(message)):
        speculating(NAME, None, rollback, memory_bytes=num_bytes - 1)


def test_the_strategies_need_what_their_names_say() -> None:
    """A state per node and layer; one layer's, and inputs; inputs alone."""
    sizes = {}
    for rollback in ROLLBACKS:
        with HybridRuntime(
            wide_model(KINDS[0]), compile="off", max_num_seqs=4, speculative=config(rollback, num_nodes=24)
        ) as rt:
            stats = rt.stats().speculation
            assert stats is not None
            sizes[rollback] = stats.record_bytes
    assert sizes["fold"] < sizes["replay"] < sizes["snapshot"]

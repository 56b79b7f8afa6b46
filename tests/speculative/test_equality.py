"""Speculative texts are those of plain decoding, token for token in float64, whatever is drafted and however rejected
tokens are rolled back.
"""

from __future__ import annotations

from functools import cache

import pytest

from hybrid_runtime import RequestOutput
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle, poison_free_slots
from tests.parity.zoo import CASES
from tests.speculative.scripted_drafter import CHAIN, EMPTY, RIGHT, TREE, TWINS, WRONG
from tests.speculative.speculative_runs import (
    KINDS,
    MIXED,
    MIXED_LENGTHS,
    ROLLBACKS,
    TIGHT,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    scripted,
    speculating,
)

PROMPTS = random_prompts(1, MIXED_LENGTHS)


@cache
def expected(name: str) -> list[RequestOutput]:
    with plain(name) as rt:
        return rt.generate(PROMPTS, list(MIXED))


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_model_and_rollback_in_pools_that_preempt_and_evict(name: str, rollback: str) -> None:
    """Greedy and sampled rows in one batch, with drafts and without. Slots of nobody hold NaN."""
    drafter = scripted(expected(name), seed=len(name))
    with speculating(name, drafter, rollback, **TIGHT) as rt:
        ids = [rt.add_request(prompt, params) for prompt, params in zip(PROMPTS, MIXED, strict=True)]
        found: dict[str, RequestOutput] = {}
        while rt.has_unfinished:
            poison_free_slots(rt)
            found |= {output.request_id: output for output in rt.step()}
        assert outcomes([found[request_id] for request_id in ids]) == outcomes(expected(name))
        assert rt.stats().scheduler.num_preemptions > 0
        assert num_accepted(rt) > 10
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("kinds", [(RIGHT,), (WRONG,), (TWINS,), (EMPTY, RIGHT), (RIGHT, WRONG, EMPTY)])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_drafts_of_one_kind(shape: str, kinds: tuple[str, ...]) -> None:
    """All accepted, none accepted, rows that draft beside rows that do not; a boundary of tracking at every token."""
    case = len(kinds) + len(kinds[0]) + len(shape)  # so that each model and rollback comes up
    name, rollback = KINDS[case % 3], ROLLBACKS[case // 2 % 3]
    drafter = scripted(expected(name), shape=shape, kinds=kinds)
    with speculating(name, drafter, rollback, track_interval=1) as rt:
        assert outcomes(rt.generate(PROMPTS, list(MIXED))) == outcomes(expected(name))
        stats = rt.stats().speculation
        assert stats is not None
        assert stats.num_drafted_tokens > 0
        assert (stats.num_accepted_tokens == 0) == (kinds == (WRONG,))
        if kinds == (RIGHT,):
            assert stats.num_accepted_tokens == stats.num_drafted_tokens
        assert_content(rt)
        assert_idle(rt)

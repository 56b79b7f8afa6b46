"""Max-min fairness of the prefill budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.scheduling.budget import share_budget

BUDGETS = st.integers(0, 60)
CLAIMS = st.lists(st.integers(0, 30), max_size=8)


def water_filling(budget: int, wanted: list[int]) -> list[int]:
    """Hands out one token at a time to whoever has least and wants more; among equals to the largest claim."""
    shares = [0] * len(wanted)
    while budget and (open_claims := [i for i in range(len(wanted)) if shares[i] < wanted[i]]):
        poorest = min(open_claims, key=lambda i: (shares[i], -wanted[i], i))
        shares[poorest] += 1
        budget -= 1
    return shares


@given(BUDGETS, CLAIMS)
def test_nobody_gets_more_than_wanted_and_nothing_is_left_while_somebody_wants(budget, wanted):
    shares = share_budget(budget, wanted)
    assert len(shares) == len(wanted)
    assert all(0 <= share <= claim for share, claim in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))


@given(BUDGETS, CLAIMS)
def test_nobody_could_get_more_without_taking_from_somebody_who_has_at_most_as_much(budget, wanted):
    shares = share_budget(budget, wanted)
    for share, claim in zip(shares, wanted, strict=True):
        if share < claim:
            # A whole token is the least that can move: a giver that is one ahead would only trade places.
            assert all(other <= share + 1 for other in shares)


@given(BUDGETS, CLAIMS)
def test_equals_water_filling(budget, wanted):
    assert share_budget(budget, wanted) == water_filling(budget, wanted)


@given(BUDGETS, CLAIMS)
def test_a_larger_claim_never_gets_less(budget, wanted):
    by_claim = sorted(zip(wanted, share_budget(budget, wanted), strict=True))
    assert all(low[1] <= high[1] for low, high in pairwise(by_claim))


@pytest.mark.parametrize(
    ("budget", "wanted", "shares"),
    [
        (10, [], []),
        (0, [3, 4], [0, 0]),
        (10, [3, 4], [3, 4]),
        (10, [100], [10]),
        (10, [100, 2], [8, 2]),
        (10, [2, 100, 100], [2, 4, 4]),
        (10, [5, 5, 5], [4, 3, 3]),
        (2, [9, 9, 9], [1, 1, 0]),
    ],
)
def test_worked_cases(budget, wanted, shares):
    assert share_budget(budget, wanted) == shares

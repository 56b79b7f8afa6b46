"""DraftBudget: what keeps failing drafts less, what succeeds returns, and nothing is stuck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.speculative.adaptive import ASK_EVERY, FIRST_PAUSE, LONGEST_PAUSE, SILENCE, DraftBudget


def limits_of(budget: DraftBudget, num_rounds: int, *, accepted: bool) -> list[int]:
    """The limits of rounds that use them up, and in which one draft or none is accepted."""
    limits = []
    for _ in range(num_rounds):
        limits.append(budget.limit)
        budget.record(budget.limit, min(budget.limit, int(accepted)))
    return limits


def test_failing_drafts_halve_the_limit_after_every_second_round():
    assert limits_of(DraftBudget(15), 9, accepted=False) == [15, 15, 7, 7, 3, 3, 1, 1, 0]


def test_pauses_double_up_to_the_longest_and_end_in_a_probe_of_one_node():
    limits = limits_of(DraftBudget(1), 1000, accepted=False)
    assert limits[:2] == [1, 1]
    pauses = "".join(map(str, limits[2:])).split("1")
    assert [len(pause) for pause in pauses[:8]] == [8, 16, 32, 64, 128, 128, 128, 128]
    assert (FIRST_PAUSE, LONGEST_PAUSE) == (8, 128)


def test_success_returns_to_the_maximum_and_makes_the_next_pause_a_first_one():
    budget = DraftBudget(10)
    limits_of(budget, 300, accepted=False)
    while budget.limit == 0:
        budget.record(0, 0)
    assert limits_of(budget, 6, accepted=True) == [1, 2, 4, 8, 10, 10]
    limits = limits_of(budget, 30, accepted=False)
    first = limits.index(0)
    assert limits[first : first + FIRST_PAUSE + 2] == [0] * FIRST_PAUSE + [1, 0]


def test_one_failure_between_successes_changes_nothing():
    budget = DraftBudget(4)
    for _ in range(20):
        budget.record(4, 0)
        assert budget.limit == 4
        budget.record(4, 1)


def test_rounds_that_could_not_draft_are_no_failures():
    budget = DraftBudget(4)
    for _ in range(100):
        budget.record(0, 0)
    assert (budget.limit, budget.num_rounds) == (4, 0)


def test_a_result_that_comes_after_the_limit_fell_counts():
    budget = DraftBudget(1)
    for _ in range(4):
        budget.record(1, 0)
    assert budget.limit == 0
    budget.record(1, 1)
    assert budget.limit == 1
    assert (budget.num_rounds, budget.num_drafted_tokens, budget.num_accepted_tokens) == (5, 5, 1)


def test_failures_that_come_during_a_pause_do_not_make_it_longer():
    budget = DraftBudget(1)
    for _ in range(6):
        budget.record(1, 0)
    assert limits_of(budget, FIRST_PAUSE + 1, accepted=False) == [0] * FIRST_PAUSE + [1]


@given(
    max_nodes=st.integers(1, 63),
    rounds=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), max_size=200),
)
def test_any_history_is_counted_and_leaves_a_way_back(max_nodes, rounds):
    budget, counted = DraftBudget(max_nodes), []
    for drafted, accepted in rounds:
        counted.append((min(drafted, budget.limit), min(drafted, budget.limit, accepted)))
        budget.record(*counted[-1])
        assert 0 <= budget.limit <= max_nodes
    assert budget.num_rounds == sum(drafted > 0 for drafted, _ in counted)
    assert budget.num_drafted_tokens == sum(drafted for drafted, _ in counted)
    assert budget.num_accepted_tokens == sum(accepted for _, accepted in counted)
    limits = limits_of(budget, LONGEST_PAUSE + 7, accepted=True)  # a pause, then 1, 2, 4, ..., 63
    assert limits[-1] == max_nodes


@pytest.mark.parametrize("result", [(5, 0), (2, 3), (-1, -1), (1, -1)])
def test_an_impossible_result_is_refused(result):
    with pytest.raises(ValueError, match=f"{result[1]} accepted of {result[0]} drafted, where 4 are allowed"):
        DraftBudget(4).record(*result)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_nodes must be at least 1, not 0"):
        DraftBudget(0)


def test_who_has_nothing_to_draft_is_asked_less_often() -> None:
    budget = DraftBudget(4)
    asked = []
    for _ in range(SILENCE + 3 * ASK_EVERY):
        asked.append(budget.is_due)
        budget.record(0, 0)
    assert all(asked[:SILENCE])
    assert sum(asked[SILENCE:]) == 3
    assert budget.limit == 4
    budget.record(2, 0)
    assert budget.is_due

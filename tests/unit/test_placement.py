"""Which checkpoints a request leaves: against the rules written down once more, length by length."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.scheduling.placement import (
    ORIGINS,
    CheckpointPolicy,
    due_after_decode,
    due_in_prompt,
    due_in_span,
)

policies = st.builds(
    CheckpointPolicy,
    min_saving=st.integers(1, 12),
    checkpoint_interval=st.none() | st.integers(1, 10),
    track_interval=st.none() | st.integers(1, 8),
)


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, object]:
    prompt_len = draw(st.integers(1, 40))
    state_length = draw(st.integers(0, prompt_len - 1))
    return {
        "prompt_len": prompt_len,
        "hints": draw(st.lists(st.integers(1, prompt_len), unique=True, max_size=5)),
        "state_length": state_length,
        "kv_length": draw(st.integers(state_length, prompt_len - 1)),
    }


def reason_at(policy: CheckpointPolicy, length: int, prompt: dict) -> str | None:
    """Why a prefill leaves a state at `length`, if it does."""
    tail, junction = prompt["prompt_len"] - 1, prompt["kv_length"]
    if length <= prompt["state_length"]:
        return None
    if length in prompt["hints"]:
        return "hint"
    if length == tail:
        return "tail"
    saves_enough = junction - prompt["state_length"] >= policy.min_saving
    if length == junction and saves_enough and tail - junction >= policy.min_saving:
        return "junction"
    if policy.checkpoint_interval and length % policy.checkpoint_interval == 0 and length < prompt["prompt_len"]:
        return "interval"
    return None


@given(policy=policies, prompt=prompts())
def test_a_prompt_leaves_what_the_rules_say(policy: CheckpointPolicy, prompt: dict) -> None:
    due = due_in_prompt(policy, **prompt)
    expected = {length: reason_at(policy, length, prompt) for length in range(1, prompt["prompt_len"] + 1)}
    assert due == {length: reason for length, reason in expected.items() if reason}
    assert list(due) == sorted(due)


@pytest.mark.parametrize(("state", "kv", "is_due"), [(8, 40, True), (9, 40, False), (0, 67, True), (0, 68, False)])
def test_a_junction_must_save_enough_on_both_sides(state: int, kv: int, is_due: bool) -> None:
    due = due_in_prompt(CheckpointPolicy(min_saving=32), prompt_len=100, hints=(), state_length=state, kv_length=kv)
    assert due == ({kv: "junction", 99: "tail"} if is_due else {99: "tail"})


@given(policy=policies, prompt=prompts(), cuts=st.sets(st.integers(1, 39)))
def test_chunks_of_any_size_pass_every_due_length_once(policy: CheckpointPolicy, prompt: dict, cuts: set[int]) -> None:
    due = due_in_prompt(policy, **prompt)
    borders = [prompt["state_length"], *sorted(cuts), prompt["prompt_len"]]
    inside = [border for border in borders if prompt["state_length"] <= border <= prompt["prompt_len"]]
    spans = [due_in_span(due, start, stop) for start, stop in pairwise(inside)]
    assert sorted(item for span in spans for item in span) == sorted(due.items())


def test_a_span_has_its_end_and_not_its_start_and_the_most_important_come_first() -> None:
    due = {10: "interval", 20: "junction", 25: "tail", 26: "hint", 30: "hint", 5: "track"}
    assert due_in_span(due, 10, 30) == [(26, "hint"), (30, "hint"), (25, "tail"), (20, "junction")]
    assert due_in_span(due, 9, 29) == [(26, "hint"), (25, "tail"), (20, "junction"), (10, "interval")]
    assert due_in_span(due, 30, 31) == []
    assert ORIGINS.index("hint") < ORIGINS.index("tail") < ORIGINS.index("junction") < ORIGINS.index("interval")


@given(policy=policies, prompt_len=st.integers(1, 20), length=st.integers(1, 40), has_hint=st.booleans())
def test_decode_leaves_a_periodic_state_behind_the_prompt_only(
    policy: CheckpointPolicy, prompt_len: int, length: int, has_hint: bool
) -> None:
    """The prompt's last token may be a decode row, too: there only what the prompt is to leave is due."""
    due = {prompt_len: "hint"} if has_hint else {}
    origin = due_after_decode(policy, due, prompt_len=prompt_len, length=length)
    if length == prompt_len:
        assert origin == ("hint" if has_hint else None)
    elif policy.track_interval is None or length < prompt_len:
        assert origin is None
    else:
        assert origin == ("track" if length % policy.track_interval == 0 else None)

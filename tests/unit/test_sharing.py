"""Whom a request waits for, against a search through all pairs; and when it stops to wait."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.request import Following, Request, RequestStatus, TokenBuffer
from hybrid_runtime.scheduling.sharing import find_leader, shared_length, still_follows

tokens_of_few = st.lists(st.integers(0, 1), min_size=1, max_size=10)


def request_of(tokens: list[int], *, computed: int = 0, landed: int | None = None, name: str = "") -> Request:
    buffer = TokenBuffer(np.array(tokens, dtype=np.int32), 20)
    request = Request(name or str(tokens), 0, SamplingParams(), buffer, priority=0, arrival=0, seed=0)
    request.num_computed_tokens, request.num_landed_tokens = computed, computed if landed is None else landed
    return request


def best_length(request: Request, leader: Request, state_length: int, min_saving: int) -> int:
    """The deepest length at which `leader` can still leave a state that `request` may resume from; 0: none."""
    saving = 1 if leader.request_id == request.request_id else min_saving
    common = 0
    for ours, theirs in zip(request.tokens[:-1].tolist(), leader.tokens[:].tolist(), strict=False):
        if ours != theirs:
            break
        common += 1
    if common <= leader.num_computed_tokens:  # in flight are the checkpoints that are due, and nothing can be added
        lengths = [length for length in leader.due_checkpoints if leader.num_landed_tokens < length <= common]
        common = max(lengths, default=0)
    return common if common > leader.num_landed_tokens and common - state_length >= saving else 0


@st.composite
def leaders(draw: st.DrawFn) -> Request:
    tokens = draw(tokens_of_few)
    name = draw(st.sampled_from(["follower", ""]))
    computed = draw(st.integers(0, len(tokens)))
    request = request_of(tokens, computed=computed, landed=draw(st.integers(0, computed)), name=name)
    request.due_checkpoints = dict.fromkeys(draw(st.sets(st.integers(1, len(tokens)))), "hint")
    return request


@given(
    tokens=tokens_of_few,
    prefilling=st.lists(leaders(), max_size=4),
    state_length=st.integers(0, 9),
    min_saving=st.integers(1, 5),
)
def test_the_deepest_state_to_come_is_waited_for(
    tokens: list[int], prefilling: list[Request], state_length: int, min_saving: int
) -> None:
    follower = request_of(tokens, name="follower")
    lengths = [best_length(follower, leader, state_length, min_saving) for leader in prefilling]
    found = find_leader(follower, prefilling, state_length=state_length, min_saving=min_saving)
    if found is None:
        assert not any(lengths)
    else:
        assert found.length == max(lengths)
        assert found.leader is prefilling[lengths.index(found.length)], "of several the first"


@pytest.mark.parametrize(
    ("follower", "leader", "length"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], 3),  # equal: its last token must run
        ([1, 1, 1, 1, 0, 0], [1, 1, 1, 1], 4),  # longer: the leader's whole prompt
        ([1, 1, 1], [1, 1, 1, 1, 1], 2),  # a prefix of the leader's
        ([1, 1, 0, 0], [1, 1, 1, 1], 2),
        ([0, 1, 1], [1, 1, 1], None),
        ([1], [1, 1], None),
    ],
)
def test_lengths(follower: list[int], leader: list[int], length: int | None) -> None:
    found = find_leader(request_of(follower), [request_of(leader, name="leader")], state_length=0, min_saving=2)
    assert (None if found is None else found.length) == length


def test_a_request_waits_as_long_as_the_state_is_to_come() -> None:
    leader, follower = request_of([1] * 8, name="leader"), request_of([1] * 6)
    assert not still_follows(follower)
    follower.following = Following(leader, 5)
    leader.status, leader.due_checkpoints = RequestStatus.RUNNING, {5: "junction", 7: "tail"}
    for landed, expected in ((0, True), (4, True), (5, False), (6, False)):
        leader.num_landed_tokens, leader.num_computed_tokens = landed, 7
        assert still_follows(follower) is expected
    leader.num_landed_tokens = 4
    for status in (RequestStatus.WAITING, RequestStatus.FINISHED):
        leader.status = status
        assert not still_follows(follower)
    leader.status, leader.due_checkpoints = RequestStatus.RUNNING, {7: "tail"}
    assert not still_follows(follower), "admitted again, the leader does not know of it"


@given(pair=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=8))
def test_shared_length(pair: list[tuple[int, int]]) -> None:
    ours, theirs = np.array(pair, dtype=np.int32).reshape(-1, 2).T
    expected = next((place for place, (a, b) in enumerate(pair) if a != b), len(pair))
    assert shared_length(ours, theirs) == expected

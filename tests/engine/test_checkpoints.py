"""Checkpoints inside prompts: at exactly the asked lengths, from the forwards that run anyway, right in content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.cache_content import assert_content, num_computed, num_forwards, states_of
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, random_tokens, runtime_of, solo_tokens, tokens_of


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(41)


@pytest.mark.parametrize("kind", MIXER_KINDS)
def test_states_of_every_origin_come_from_one_forward(kind: str, rng: np.random.Generator) -> None:
    """A second visitor leaves hints, an interval, a junction and its tail, in one prefill; no pass is run for them."""
    prompt = random_tokens(rng, 150)
    other = [*prompt[:70], *random_tokens(rng, 80)]
    [expected] = solo_tokens(kind, [other], [3])
    with runtime_of(kind, checkpoint_interval=90) as rt:
        rt.generate(prompt[:88], greedy(1))
        before = num_forwards(rt)
        output = rt.generate(other, greedy(3, checkpoint_positions=[64, 101, 150]))[0]
        assert num_forwards(rt) - before == 1 + 2
        assert (output.num_cached_tokens, output.num_kv_matched_tokens) == (0, 70)
        assert tokens_of([output]) == [expected]
        first = {87: "tail", 88: "final"}
        second = {64: "hint", 70: "junction", 90: "interval", 101: "hint", 149: "tail", 150: "hint", 152: "final"}
        assert states_of(rt) == dict(sorted((first | second).items()))
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("kind", MIXER_KINDS)
@settings(max_examples=max(6, settings().max_examples // 8))
@given(data=st.data())
def test_any_positions_in_chunks_of_any_size(kind: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 70))
    hints = data.draw(st.lists(st.integers(1, length), max_size=4, unique=True))
    interval = data.draw(st.none() | st.integers(1, 30))
    budget = data.draw(st.integers(1, length + 1))
    prompt = random_tokens(np.random.default_rng(length), length)
    with runtime_of(kind, max_num_batched_tokens=budget, checkpoint_interval=interval) as rt:
        rt.generate(prompt, greedy(2, checkpoint_positions=hints))
        due = dict.fromkeys(range(interval, length, interval), "interval") if interval else {}
        due |= {length - 1: "tail"} | dict.fromkeys(hints, "hint") | {length + 1: "final"}
        due.pop(0, None)
        assert states_of(rt) == dict(sorted(due.items()))
        assert num_computed(rt) == length + 1
        assert rt.stats().cache.num_skipped_checkpoints == {}
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("budget", range(1, 15))
def test_positions_at_every_chunk_border(budget: int, rng: np.random.Generator) -> None:
    """Every length of a prompt is asked for, so some lie at the first and the last token of each chunk."""
    prompt = random_tokens(rng, 13)
    with runtime_of("gdn", max_num_batched_tokens=budget) as rt:
        rt.generate(prompt, greedy(1, checkpoint_positions=range(1, 14)))
        assert states_of(rt) == dict.fromkeys(range(1, 14), "hint")
        assert_content(rt)
        assert_idle(rt)


def test_a_hint_at_the_end_of_the_prompt_when_only_one_token_is_left(rng: np.random.Generator) -> None:
    """That token is a decode row, and so is the checkpoint's."""
    prompt = random_tokens(rng, 40)
    [expected] = solo_tokens("kda", [prompt], [4])
    with runtime_of("kda") as rt:
        rt.warmup(prompt[:39])
        output = rt.generate(prompt, greedy(4, checkpoint_positions=[40, 12]))[0]
        assert (output.num_cached_tokens, output.checkpoint_origin) == (39, "hint")
        assert tokens_of([output]) == [expected]
        assert states_of(rt) == {38: "hint", 39: "hint", 40: "hint", 43: "final"}
        assert_content(rt)
        longer = rt.generate([*prompt, 3, 4], greedy(1))[0]
        assert (longer.num_cached_tokens, longer.checkpoint_origin) == (40, "hint")
        assert_idle(rt)


def test_reasons_that_meet_at_one_length_leave_one_state(rng: np.random.Generator) -> None:
    """It has the first of the reasons; a state that is there already keeps its own, and the slot goes back."""
    prompt = random_tokens(rng, 41)
    with runtime_of("kda", checkpoint_interval=20) as rt:
        rt.generate(prompt, greedy(1, checkpoint_positions=[40, 41]))
        assert states_of(rt) == {20: "interval", 40: "hint", 41: "hint"}
        assert rt.stats().cache.num_kept_checkpoints == {"interval": 1, "hint": 2}
        rt.generate(prompt, greedy(1))
        assert states_of(rt) == {20: "interval", 40: "hint", 41: "hint"}
        assert rt.stats().cache.num_kept_checkpoints == {"interval": 1, "hint": 2}
        assert rt.stats().state.in_use == 0
        assert_idle(rt)


@pytest.mark.parametrize("num_spare", [0, 1, 2, 3])
@pytest.mark.parametrize("budget", [2048, 11])
def test_without_a_free_slot_a_checkpoint_is_skipped_and_counted(
    num_spare: int, budget: int, rng: np.random.Generator
) -> None:
    """What is most important is kept: hints, then the tail; in chunks, a later one may take an earlier one's slot."""
    prompt = random_tokens(rng, 45)
    [expected] = solo_tokens("mamba2", [prompt], [5])
    with runtime_of(
        "mamba2",
        num_state_slots=1 + num_spare,
        max_num_seqs=1,
        checkpoint_interval=20,
        track_interval=3,
        max_num_batched_tokens=budget,
    ) as rt:
        output = rt.generate(prompt, greedy(5, checkpoint_positions=[10]))[0]
        assert tokens_of([output]) == [expected]
        skipped = rt.stats().cache.num_skipped_checkpoints
        if num_spare == 0:
            assert skipped == {"hint": 1, "interval": 2, "tail": 1, "track": 1}
        elif budget == 2048:
            assert skipped == {1: {"tail": 1, "interval": 2}, 2: {"interval": 2}, 3: {"interval": 1}}[num_spare]
        else:
            assert skipped == ({"interval": 1} if num_spare == 1 else {}), "a chunk holds both the second and the tail"
        assert_content(rt)
        assert_idle(rt)

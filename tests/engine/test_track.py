"""Periodic checkpoints of outputs: at the right lengths, kept however the request ends, and never leaked."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from hybrid_runtime import HybridRuntime, SamplingParams
from tests.engine.cache_content import assert_content, num_computed, states_of
from tests.engine.helpers import (
    MIXER_KINDS,
    assert_idle,
    greedy,
    poison_free_slots,
    random_tokens,
    runtime_of,
    solo_tokens,
    tokens_of,
)

INTERVAL = 4


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(51)


def use_two_track_slots(rt: HybridRuntime) -> None:
    residency = rt._engine.scheduler.residency
    residency.policy = dataclasses.replace(residency.policy, num_track_slots=2)


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 6])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_the_last_boundary_is_kept_at_every_length(prompt_len: int, num_slots: int, rng: np.random.Generator) -> None:
    """With a boundary that the first decode crosses, one at the end of the prompt, and one exactly at the end: the
    final state is that one's, and no other is left.
    """
    prompt = random_tokens(rng, prompt_len)
    with runtime_of("kda", track_interval=INTERVAL) as rt:
        if num_slots == 2:
            use_two_track_slots(rt)
        for count in range(1, 2 * INTERVAL + 2):
            rt.reset_prefix_cache()
            rt.generate(prompt, greedy(count))
            computed = prompt_len + count - 1
            boundaries = [n for n in range(INTERVAL, computed + 1, INTERVAL) if n > prompt_len]
            expected = {prompt_len - 1: "tail"} | dict.fromkeys(boundaries[-1:], "track") | {computed: "final"}
            assert states_of(rt) == expected
            assert rt.stats().state.in_use == 0
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_request_that_parts_ways_inside_an_output_resumes_there(
    kind: str, num_slots: int, rng: np.random.Generator
) -> None:
    """After an abort: the text went on for 9 tokens, 8 boundaries of one token or 2 of four behind the prompt."""
    prompt = random_tokens(rng, 6)
    with runtime_of(kind, track_interval=INTERVAL) as rt:
        if num_slots == 2:
            use_two_track_slots(rt)
        request_id = rt.add_request(prompt, greedy(50))
        output = rt.step()[0]
        while len(output.outputs[0].token_ids) < 9:
            poison_free_slots(rt)
            [output] = rt.step()
        rt.abort(request_id)
        rt.step()
        assert states_of(rt) == {5: "tail", 12: "track", 14: "final"}
        assert_content(rt)
        words = list(output.outputs[0].token_ids)
        other = [*prompt, *words[:7], *random_tokens(rng, 5)]
        again = rt.generate(other, greedy(5))[0]
        assert (again.num_cached_tokens, again.checkpoint_origin) == (12, "track")
        assert tokens_of([again]) == solo_tokens(kind, [other], [5])
        assert_idle(rt)


class Letters:
    """Decodes each token to a letter of its own."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(0x400 + token_id) for token_id in token_ids)


def test_after_a_stop_string_the_state_before_it_is_there(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 6)
    with runtime_of("gdn", track_interval=INTERVAL, tokenizer=Letters()) as rt:
        text = rt.generate(prompt, greedy(20))[0].outputs[0].text
        rt.reset_prefix_cache()
        place = next(place for place in range(8, 20) if text.index(text[place - 1 : place + 1]) == place - 1)
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop=text[place - 1 : place + 1])
        output = rt.generate(prompt, params)[0]
        assert output.outputs[0].finish_reason == "stop"
        computed = 6 + place
        assert states_of(rt) == {5: "tail", (computed - 1) // 4 * 4: "track", computed: "final"}
        assert_content(rt)
        assert_idle(rt)


def test_two_slots_take_turns(rng: np.random.Generator) -> None:
    """One is written while the other holds the latest checkpoint."""
    with runtime_of("kda", track_interval=2) as rt:
        use_two_track_slots(rt)
        rt.add_request(random_tokens(rng, 5), greedy(20))
        rt.step()
        [request] = rt._engine.scheduler.running
        history = []
        while rt.has_unfinished:
            tracked = request.tracked
            if tracked is not None and tracked not in history:
                history.append(tracked)
                assert tracked.state_slot in request.resident.track_slots
                assert tracked.length == request.num_computed_tokens
            rt.step()
        assert [checkpoint.length for checkpoint in history] == [6, 8, 10, 12, 14, 16, 18, 20, 22]
        slots = [checkpoint.state_slot for checkpoint in history]
        assert len(set(slots)) == 2
        assert all(a != b for a, b in pairwise(slots))
        assert_idle(rt)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_that_is_about_to_be_written_is_no_checkpoint_any_more(num_slots: int, rng: np.random.Generator) -> None:
    """Whatever happens before the forward: the old length must not go with the new content."""
    with runtime_of("kda", track_interval=2) as rt:
        if num_slots == 2:
            use_two_track_slots(rt)
        request_id = rt.add_request(random_tokens(rng, 5), greedy(20))
        for _ in range(5):
            rt.step()
        residency, [request] = rt._engine.scheduler.residency, rt._engine.scheduler.running
        tracked = request.tracked
        assert tracked is not None
        length = request.num_computed_tokens + 1
        written = residency.track(request, length)
        assert written is not None
        assert request.tracked == (tracked if num_slots == 2 else None)
        assert (written.state_slot == tracked.state_slot) == (num_slots == 1)
        assert (residency.track(request, length + 1) is None) == (num_slots == 1), "what is being written stays"
        assert request.tracked is None
        rt.abort(request_id)
        assert states_of(rt) == {4: "tail", 9: "final"}
        assert_idle(rt)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("failing", [1, 2, 3, 5, 6, 10])
def test_a_forward_that_raises_leaks_no_track_slot(
    num_slots: int, failing: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At and between boundaries, for two rows at once; the tokens are those of an undisturbed run."""
    prompts = [random_tokens(rng, 6), random_tokens(rng, 7)]
    with runtime_of("mamba2", track_interval=INTERVAL) as rt:
        if num_slots == 2:
            use_two_track_slots(rt)
        expected = tokens_of(rt.generate(prompts, greedy(12)))
        rt.reset_prefix_cache()
        decode, calls = rt.model.decode, iter(range(1, 100))

        def fail_once(inputs: object, memory: object) -> torch.Tensor:
            logits = decode(inputs, memory)  # type: ignore[arg-type]
            if next(calls) == failing and len(logits) > 1:
                raise RuntimeError("planted")
            return logits

        monkeypatch.setattr(rt.model, "decode", fail_once)
        assert tokens_of(rt.generate(prompts, greedy(12))) == expected
        assert_content(rt)
        assert_idle(rt)


def test_a_preempted_request_leaves_its_periodic_state_and_goes_on(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 6)
    [expected] = solo_tokens("kda", [prompt], [14])
    with runtime_of("kda", track_interval=INTERVAL) as rt:
        rt.add_request(prompt, greedy(14))
        tokens: tuple[int, ...] = ()
        while rt.has_unfinished:
            [output] = rt.step()
            tokens = output.outputs[0].token_ids
            if len(tokens) in (4, 9) and not output.finished:
                [request] = rt._engine.scheduler.running
                rt._engine.scheduler.preempt(request)
                assert rt.stats().state.in_use == 0
        assert tokens == expected
        assert states_of(rt) == {5: "tail", 8: "track", 9: "final", 12: "track", 14: "final", 16: "track", 19: "final"}
        assert num_computed(rt) == 6 + 13
        assert_content(rt)
        assert_idle(rt)


def test_with_the_interval_off_or_the_cache_off_nothing_is_tracked(rng: np.random.Generator) -> None:
    for options in ({"track_interval": None}, {"track_interval": 2, "enable_prefix_cache": False}):
        with runtime_of("kda", **options) as rt:
            rt.generate(random_tokens(rng, 6), greedy(9))
            assert "track" not in states_of(rt).values()
            assert rt.stats().cache.num_skipped_checkpoints == {}
            assert_idle(rt)

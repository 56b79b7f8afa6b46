"""Junctions, why a request missed, and what a preempted request computes again."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_runtime import HybridRuntime, RequestOutput
from tests.engine.cache_content import assert_content, num_computed
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, random_tokens, runtime_of, solo_tokens, tokens_of
from tests.engine.loop_helpers import drain


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(71)


def reason(rt: HybridRuntime, prompt: list[int], count: int = 2, **options: object) -> str | None:
    return rt.generate(prompt, greedy(count, **options))[0].cache_miss_reason


def hit(output: RequestOutput) -> tuple[int, str | None, str | None]:
    return output.num_cached_tokens, output.checkpoint_origin, output.cache_miss_reason


def origins_in(rt: HybridRuntime) -> set[str | None]:
    return {node.origin for node in rt.prefix_cache.nodes()}


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize(("shared", "own"), [(32, 33), (64, 100)])
def test_the_third_visitor_of_a_prefix_hits(kind: str, shared: int, own: int, rng: np.random.Generator) -> None:
    """The second one leaves the state where it parts ways with the first, which it can't know before."""
    prefix = random_tokens(rng, shared)
    prompts = [[*prefix, 3 + place, *random_tokens(rng, own - 1)] for place in range(4)]
    expected = solo_tokens(kind, prompts, [3] * 4)
    with runtime_of(kind) as rt:
        outputs = [rt.generate(prompt, greedy(3))[0] for prompt in prompts]
        assert [hit(output) for output in outputs] == [
            (0, None, "cold"),
            (0, None, "no_state_on_path"),
            (shared, "junction", None),
            (shared, "junction", None),
        ]
        assert [output.num_kv_matched_tokens for output in outputs] == [0, shared, shared, shared]
        assert tokens_of(outputs) == expected
        assert rt.stats().cache.num_kept_checkpoints["junction"] == 1
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize(("shared", "own"), [(31, 60), (60, 32)])
def test_a_junction_that_saves_too_little_is_not_kept(shared: int, own: int, rng: np.random.Generator) -> None:
    """Too few tokens in front of it, or too few between it and the tail, which is one token before the end."""
    prefix = random_tokens(rng, shared)
    with runtime_of("kda") as rt:
        for place in range(3):
            output = rt.generate([*prefix, 3 + place, *random_tokens(rng, own - 1)], greedy(1))[0]
        assert hit(output) == (0, None, "no_state_on_path")
        assert "junction" not in origins_in(rt)


def test_a_junction_behind_a_state_counts_from_there(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 120)
    for position, is_kept in ((28, True), (29, False)):
        with runtime_of("kda") as rt:
            rt.generate(prompt, greedy(1, checkpoint_positions=[position]))
            other = [*prompt[:60], *random_tokens(rng, 60)]
            assert hit(rt.generate(other, greedy(1))[0]) == (position, "hint", None)
            assert ("junction" in origins_in(rt)) is is_kept


def test_reasons_of_an_empty_cache_and_of_requests_that_cannot_hit(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 20)
    with runtime_of("kda") as rt:
        assert reason(rt, [2]) == "too_short"
        assert reason(rt, prompt) == "cold"
        assert reason(rt, [2]) == "too_short"
        assert reason(rt, prompt) is None
        assert reason(rt, prompt, prompt_logprobs=0) == "prompt_logprobs"
        assert reason(rt, [*prompt[:9], 3, 4]) == "no_state_on_path"
        assert reason(rt, prompt[:10]) == "no_state_on_path"
        rt.reset_prefix_cache()
        assert reason(rt, prompt) == "cold", "what was emptied on purpose was not evicted"
        cache = rt.stats().cache
        assert cache.misses_by_reason == {"too_short": 2, "cold": 2, "prompt_logprobs": 1, "no_state_on_path": 2}
        assert cache.hits_by_origin == {"tail": 1}
        assert (cache.num_requests, cache.num_hits) == (8, 1)
        assert_idle(rt)
    with runtime_of("kda", enable_prefix_cache=False) as rt:
        assert reason(rt, prompt) == reason(rt, prompt[:1]) == "disabled"
        assert rt.stats().cache.num_requests == 0, "they looked for nothing"


def test_an_evicted_state_whose_tokens_are_still_there(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 40)
    with runtime_of("kda", eviction="lru") as rt:
        rt.generate(prompt, greedy(8))
        supply = rt._engine.memory.supply
        supply.release_states(supply.take_states(supply.states.num_free + 1))  # as another request would
        output = rt.generate([*prompt[:39], 3], greedy(1))[0]
        assert hit(output) == (0, None, "state_evicted")
        assert output.num_kv_matched_tokens == 39
        assert hit(rt.generate([*prompt[:39], 4], greedy(1))[0]) == (39, "tail", None), "the last one left it anew"
        assert rt.stats().cache.misses_by_reason == {"cold": 1, "state_evicted": 1}
        rt.reset_prefix_cache()
        assert reason(rt, prompt) == "cold", "an emptied cache does not know either what was evicted from it before"
        assert_idle(rt)


def test_evicted_tokens(rng: np.random.Generator) -> None:
    """A shorter prompt that no state ever was on is cold again, not evicted; one that had a state is."""
    prompts = [random_tokens(rng, 40) for _ in range(4)]
    with runtime_of("kda", num_kv_slots=100, max_model_len=60, max_num_seqs=1, eviction="lru") as rt:
        for prompt in prompts:
            assert reason(rt, prompt, 8) == "cold"
        assert rt.stats().cache.num_evicted_tokens > 0
        output = rt.generate(prompts[0], greedy(8))[0]
        assert (hit(output), output.num_kv_matched_tokens) == ((0, None, "kv_evicted"), 0)
        assert reason(rt, prompts[1][:30]) == "cold"
        assert rt.stats().cache.misses_by_reason == {"cold": 5, "kv_evicted": 1}
        assert_idle(rt)


def test_part_of_the_tokens_is_still_there(rng: np.random.Generator) -> None:
    """The state's own tokens are gone, those before them serve another prompt: still the tokens were evicted."""
    prompt = random_tokens(rng, 40)
    fork = [*prompt[:20], *random_tokens(rng, 20)]
    with runtime_of("kda", eviction="lru") as rt:
        rt.generate(prompt, greedy(1))
        rt.generate(fork, greedy(1))
        supply = rt._engine.memory.supply
        supply.release_kv(supply.take_kv(supply.kv.num_free + 20))
        output = rt.generate(prompt, greedy(1))[0]
        assert (hit(output), output.num_kv_matched_tokens) == ((0, None, "kv_evicted"), 20)
        assert_idle(rt)


def test_the_counters_add_up_under_pressure(rng: np.random.Generator) -> None:
    """Whatever mix of hits and misses; each row counts once, however often it is preempted."""
    pieces = [random_tokens(rng, 12) for _ in range(3)]
    options = {"num_kv_slots": 150, "max_model_len": 80, "num_state_slots": 7, "max_num_batched_tokens": 20}
    with runtime_of("mamba2", min_saving=4, track_interval=4, **options) as rt:
        outputs: list[RequestOutput] = []
        for _ in range(6):
            shapes = [rng.integers(0, 3, size=rng.integers(1, 5)) for _ in range(5)]
            batch = [[token for piece in shape for token in pieces[piece]] for shape in shapes]
            outputs += rt.generate(batch, greedy(10))
            cache = rt.stats().cache
            assert cache.num_requests == len(outputs)
            for field, counts in (
                ("checkpoint_origin", cache.hits_by_origin),
                ("cache_miss_reason", cache.misses_by_reason),
            ):
                values = [getattr(output, field) for output in outputs]
                assert counts == {value: values.count(value) for value in values if value is not None}
            assert all((o.checkpoint_origin is None) == (o.num_cached_tokens == 0) for o in outputs)
            assert all((o.checkpoint_origin is None) != (o.cache_miss_reason is None) for o in outputs)
            assert cache.num_hits + sum(cache.misses_by_reason.values()) == cache.num_requests
            assert cache.num_cached_tokens == sum(output.num_cached_tokens for output in outputs)
        assert rt.stats().scheduler.num_preemptions > 0
        assert len(cache.hits_by_origin) > 1
        assert len(cache.misses_by_reason) > 2
        assert_idle(rt)


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_preempted_request_computes_nothing_twice(kind: str, every: int, rng: np.random.Generator) -> None:
    """Sent back after any number of steps, in the middle of its prompt and of its output, again and again."""
    prompt = random_tokens(rng, 37)
    with runtime_of(kind, max_num_batched_tokens=8, track_interval=5) as rt:
        rt.add_request(prompt, greedy(12))
        tokens: tuple[int, ...] = ()
        for place in range(1, 100):
            if not rt.has_unfinished:
                break
            for output in rt.step():
                tokens = output.outputs[0].token_ids
            if place % every == 0 and rt._engine.scheduler.running:
                rt._engine.scheduler.preempt(rt._engine.scheduler.running[0])
        assert [tokens] == solo_tokens(kind, [prompt], [12])
        assert rt.stats().scheduler.num_preemptions >= 15 // every
        assert num_computed(rt) == 37 + 11
        assert output.num_cached_tokens == 0, "what a request finds of its own is no hit"
        assert rt.stats().cache.num_requests == 1
        assert_content(rt)
        assert_idle(rt)


def test_with_little_room_requests_are_preempted_and_compute_little_twice(rng: np.random.Generator) -> None:
    """Real shortage, with slots enough for the states that are left: one token per preemption at most."""
    prompts = [random_tokens(rng, 30) for _ in range(4)]
    with runtime_of("kda", num_kv_slots=150, max_model_len=80, num_state_slots=60, max_num_batched_tokens=16) as rt:
        ids = [rt.add_request(prompt, greedy(30)) for prompt in prompts]
        delivered = drain(rt)
        outputs = [delivered[request_id][-1] for request_id in ids]
        stats = rt.stats()
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [30] * 4)
        assert stats.scheduler.num_preemptions > 0
        evicted = stats.cache.num_evicted_tokens
        assert num_computed(rt) <= 4 * (30 + 29) + stats.scheduler.num_preemptions + evicted
        assert sum(output.metrics.num_preemptions for output in outputs) == stats.scheduler.num_preemptions
        assert_idle(rt)

"""What must not change the tokens: caching, chunking, batching, preemption. Strict, in float64, for all mixer kinds."""

from __future__ import annotations

import numpy as np
import pytest

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

pytestmark = pytest.mark.parametrize("kind", MIXER_KINDS)


def test_cached_equals_uncached(kind: str) -> None:
    """Prompts that extend, fork and repeat each other, asked for until nearly everything hits."""
    rng = np.random.default_rng(1)
    header = random_tokens(rng, 70)
    prompts = [header, header + random_tokens(rng, 9), header + random_tokens(rng, 1), header[:40], header[:69]]
    prompts.append(prompts[1] + random_tokens(rng, 130))
    expected = solo_tokens(kind, prompts, [10] * len(prompts))
    with runtime_of(kind) as rt:
        for _ in range(2):
            poison_free_slots(rt)
            outputs = [rt.generate(prompt, greedy(10))[0] for prompt in prompts]
            assert tokens_of(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [len(prompt) - 1 for prompt in prompts]
        assert_idle(rt)


def test_chunked_at_every_split_equals_whole(kind: str) -> None:
    prompt = random_tokens(np.random.default_rng(2), 37)
    [expected] = solo_tokens(kind, [prompt], [6])
    for budget in range(1, len(prompt) + 1):
        with runtime_of(
            kind, max_num_batched_tokens=budget, num_kv_slots=64, num_state_slots=4, max_model_len=64
        ) as rt:
            poison_free_slots(rt)
            assert tokens_of(rt.generate(prompt, greedy(6))) == [expected], budget
            assert rt.generate(prompt, greedy(6))[0].num_cached_tokens == len(prompt) - 1


def test_rows_of_a_batch_equal_solo_runs(kind: str) -> None:
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, length) for length in (1, 2, 5, 64, 65, 130, 31, 1, 97, 8)]
    max_tokens = [12, 1, 30, 9, 2, 17, 5, 25, 3, 14]
    expected = solo_tokens(kind, prompts, max_tokens)
    for options in ({}, {"max_num_batched_tokens": 23}, {"max_num_seqs": 3, "enable_prefix_cache": False}):
        with runtime_of(kind, **options) as rt:
            poison_free_slots(rt)
            assert tokens_of(rt.generate(prompts, [greedy(count) for count in max_tokens])) == expected
            assert_idle(rt)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_preempted_equals_undisturbed(kind: str, enable_prefix_cache: bool) -> None:
    """A pool that cannot hold all rows to their ends: some are thrown out, mid-prefill too, and resume."""
    rng = np.random.default_rng(4)
    prompts = [random_tokens(rng, length) for length in (40, 35, 50, 20)]
    max_tokens = [40, 60, 30, 70]
    expected = solo_tokens(kind, prompts, max_tokens)
    with runtime_of(
        kind,
        num_kv_slots=160,
        num_state_slots=7,
        max_model_len=128,
        max_num_batched_tokens=16,
        enable_prefix_cache=enable_prefix_cache,
    ) as rt:
        outputs = rt.generate(prompts, [greedy(count) for count in max_tokens])
        assert tokens_of(outputs) == expected
        assert rt.stats().scheduler.num_preemptions > 0
        assert sum(output.metrics.num_preemptions for output in outputs) == rt.stats().scheduler.num_preemptions
        assert_idle(rt)


def test_smallest_pools(kind: str) -> None:
    """One state slot and just enough KV: no checkpoint can be kept while a request runs, and nothing breaks."""
    rng = np.random.default_rng(5)
    prompts = [random_tokens(rng, length) for length in (20, 1, 25)]
    expected = solo_tokens(kind, prompts, [12, 20, 7])
    with runtime_of(kind, num_kv_slots=32, num_state_slots=1, max_model_len=32) as rt:
        for _ in range(2):
            assert tokens_of(rt.generate(prompts, [greedy(12), greedy(20), greedy(7)])) == expected
        assert rt.stats().cache.num_skipped_checkpoints["tail"] > 0
        assert_idle(rt)

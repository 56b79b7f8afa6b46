"""How much of a prompt is skipped, what it costs to be able to, and what the outputs say about it."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_runtime import HybridRuntime, SamplingParams
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, random_tokens, runtime_of, tokens_of


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize("length", [2, 3, 64, 65, 128, 200])
def test_same_prompt_twice_skips_all_but_one_token(kind: str, length: int, rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, length)
    with runtime_of(kind, max_num_batched_tokens=50) as rt:
        first, second = (rt.generate(prompt, greedy(4))[0] for _ in range(2))
    assert (first.num_cached_tokens, first.checkpoint_origin, first.cache_miss_reason) == (0, None, "cold")
    assert second.num_cached_tokens == length - 1
    assert (second.checkpoint_origin, second.cache_miss_reason) == ("tail", None)
    assert tokens_of([first]) == tokens_of([second])


def test_next_turn_skips_the_whole_last_turn(rng: np.random.Generator) -> None:
    """A conversation: all tokens but the last sampled one are in the state that the request leaves."""
    with runtime_of("kda") as rt:
        prompt = random_tokens(rng, 33)
        for _ in range(3):
            output = rt.generate(prompt, greedy(7))[0]
            computed = len(prompt) + 7 - 1
            prompt = [*prompt, *output.outputs[0].token_ids, *random_tokens(rng, 12)]
            following = rt.generate(prompt, greedy(1))[0]
            assert (following.num_cached_tokens, following.checkpoint_origin) == (computed, "final")
        assert_idle(rt)


def test_longer_prompt_with_the_same_beginning(rng: np.random.Generator) -> None:
    """The tail checkpoint serves what extends the prompt; a fork below it finds KV but no state."""
    with runtime_of("kda") as rt:
        prompt = random_tokens(rng, 50)
        rt.generate(prompt, greedy(1))
        longer = rt.generate(prompt[:49] + random_tokens(rng, 30), greedy(1))[0]
        assert (longer.num_cached_tokens, longer.num_kv_matched_tokens) == (49, 49)
        fork = rt.generate([*prompt[:30], *random_tokens(rng, 20)], greedy(1))[0]
        assert (fork.num_cached_tokens, fork.cache_miss_reason) == (0, "no_state_on_path")
        assert fork.num_kv_matched_tokens == 30
        shorter = rt.generate(prompt[:20], greedy(1))[0]
        assert (shorter.num_cached_tokens, shorter.num_kv_matched_tokens) == (0, 19)


def test_no_forward_is_spent_on_a_checkpoint(rng: np.random.Generator) -> None:
    """As many forwards with the cache as without, and each prompt token is computed once."""
    prompts = [random_tokens(rng, length) for length in (100, 64, 3)]
    counts = {}
    for enabled in (True, False):
        with runtime_of("mamba2", enable_prefix_cache=enabled, max_num_batched_tokens=40) as rt:
            outputs = rt.generate(prompts, greedy(5))
            runner, scheduler = rt._engine.runner, rt.stats().scheduler
            counts[enabled] = (runner.num_prefill_forwards, runner.num_decode_forwards)
            assert scheduler.num_prefill_tokens + scheduler.num_decode_tokens == 100 + 64 + 3 + 3 * 4
            assert rt.stats().cache.num_kept_checkpoints == ({"tail": 3, "final": 3} if enabled else {})
            assert [output.cache_miss_reason for output in outputs] == ["cold" if enabled else "disabled"] * 3
    assert counts[True] == counts[False]


def test_a_full_hit_costs_one_decode_row(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 120)
    with runtime_of("gdn") as rt:
        rt.generate(prompt, greedy(1))
        runner = rt._engine.runner
        prefills, decodes = runner.num_prefill_forwards, runner.num_decode_forwards
        rt.generate(prompt, greedy(1))
        assert (runner.num_prefill_forwards, runner.num_decode_forwards) == (prefills, decodes + 1)


def test_a_hit_pins_its_checkpoint_only_until_it_is_copied(rng: np.random.Generator) -> None:
    """Else every running request would hold a second state, and small pools could keep no checkpoint."""
    prompt = random_tokens(rng, 40)
    with runtime_of("kda") as rt:
        rt.generate(prompt, greedy(1))
        rt.add_request([*prompt, *random_tokens(rng, 5)], greedy(4))
        rt.step()
        assert rt.prefix_cache.num_protected_kv >= 39
        assert rt.prefix_cache.num_protected_states == 0
        while rt.has_unfinished:
            rt.step()
        assert_idle(rt)


def test_abort_keeps_what_was_computed(rng: np.random.Generator) -> None:
    """Aborted in the middle of its prefill, a request leaves its working slot, and the next one resumes from it."""
    prompt = random_tokens(rng, 90)
    with runtime_of("kda", max_num_batched_tokens=20) as rt:
        request_id = rt.add_request(prompt, greedy(3))
        rt.step()
        rt.step()
        rt.abort(request_id)
        [output] = rt.step()
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", ())
        again = rt.generate(prompt, greedy(3))[0]
        assert (again.num_cached_tokens, again.checkpoint_origin) == (40, "final")
        assert_idle(rt)


def test_prompt_logprobs_need_every_token_computed(rng: np.random.Generator) -> None:
    """They skip the lookup, are the same in any chunking, and agree with those of transformers."""
    import torch

    from tests.engine.helpers import model_of

    prompt = random_tokens(rng, 30)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
    with torch.no_grad():
        expected = torch.log_softmax(model_of("kda")(torch.tensor([prompt])).logits[0].double(), -1)
    for budget in (2048, 7, 1):
        with runtime_of("kda", max_num_batched_tokens=budget) as rt:
            for _ in range(2):
                output = rt.generate(prompt, params)[0]
                assert output.num_cached_tokens == 0
                assert output.prompt_logprobs is not None
                assert output.prompt_logprobs[0] is None
                assert len(output.prompt_logprobs) == len(prompt)
                for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
                    assert entry is not None
                    row = expected[position - 1]
                    assert entry[prompt[position]].logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
                    assert entry[prompt[position]].rank == int((row > row[prompt[position]]).sum()) + 1
                    assert 3 <= len(entry) <= 4
            assert rt.generate(prompt, greedy(2))[0].num_cached_tokens == len(prompt) - 1


def test_prompt_logprobs_survive_preemption(rng: np.random.Generator) -> None:
    prompts = [random_tokens(rng, 40) for _ in range(4)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    with runtime_of("kda") as rt:
        expected = [output.prompt_logprobs for output in rt.generate(prompts, params)]
    with runtime_of("kda", num_kv_slots=128, max_model_len=96, num_state_slots=6, max_num_batched_tokens=8) as rt:
        outputs = rt.generate(prompts, params)
        assert rt.stats().scheduler.num_preemptions > 0
    for output, entries in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        assert entries is not None
        for ours, theirs in zip(output.prompt_logprobs[1:], entries[1:], strict=True):
            assert ours is not None
            assert theirs is not None
            assert {t: lp.logprob for t, lp in ours.items()} == pytest.approx(
                {t: lp.logprob for t, lp in theirs.items()}, abs=1e-9
            )


def test_samples_of_one_prompt_share_its_prefill(rng: np.random.Generator) -> None:
    """The first sample computes the prompt, the others compute one token of it; with the cache off each does all."""
    prompt = random_tokens(rng, 80)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=7, n=3, ignore_eos=True)
    results = {}
    for enabled in (True, False):
        with runtime_of("kda", enable_prefix_cache=enabled) as rt:
            [output] = rt.generate(prompt, params)
            results[enabled] = [sample.token_ids for sample in output.outputs]
            stats = rt.stats().scheduler
            computed = stats.num_prefill_tokens + stats.num_decode_tokens
            assert computed == (80 + 1 + 1 if enabled else 3 * 80) + 3 * 4
            assert_idle(rt)
    assert results[True] == results[False]
    assert len(set(results[True])) == 3


def _lookups(rt: HybridRuntime) -> tuple[int, int, int, int]:
    cache = rt.stats().cache
    return cache.num_requests, cache.num_hits, cache.num_prompt_tokens, cache.num_cached_tokens


def test_stats_count_lookups_once_per_request(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 25)
    with runtime_of("kda") as rt:
        rt.generate([prompt], greedy(3))
        assert _lookups(rt) == (1, 0, 25, 0)
        rt.generate([prompt], greedy(3))
        assert _lookups(rt) == (2, 1, 50, 24)
        stats = rt.stats()
        assert stats.kv.free + stats.kv.cached == stats.kv.total
        assert stats.kv.cached == 25 + 3 - 1  # prompt and output without the last sampled token
        assert stats.state.cached == 2
        assert stats.kv.in_use == stats.state.in_use == 0

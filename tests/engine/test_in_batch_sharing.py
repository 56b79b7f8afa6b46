"""Requests that arrive together and start with the same tokens: these are computed once, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.engine.cache_content import assert_content, num_computed
from tests.engine.helpers import assert_idle, greedy, random_tokens, runtime_of, solo_tokens, tokens_of
from tests.engine.loop_helpers import drain

COUNT = 4  # output tokens of each request


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(61)


def family(rng: np.random.Generator, shared: int, *own: int) -> list[list[int]]:
    """Prompts with `shared` tokens in common, and some of their own each."""
    prefix = random_tokens(rng, shared)
    return [
        [*prefix, 3 + place, *random_tokens(rng, count - 1)] if count else prefix for place, count in enumerate(own)
    ]


def num_prompt_tokens(rt: HybridRuntime, num_requests: int) -> int:
    """Prompt tokens computed, where every request ended with `COUNT` output tokens."""
    return num_computed(rt) - num_requests * (COUNT - 1)


def hits(outputs: Sequence[RequestOutput]) -> list[tuple[int, str | None]]:
    return [(output.num_cached_tokens, output.checkpoint_origin) for output in outputs]


@pytest.mark.parametrize("kind", ["kda", "mamba2", "gdn"])
@pytest.mark.parametrize("budget", [2048, 16])
def test_of_four_at_once_three_hit(kind: str, budget: int, rng: np.random.Generator) -> None:
    """Also where the leader runs in chunks; nothing is computed twice."""
    prompts = family(rng, 70, 10, 10, 12, 5)
    with runtime_of(kind, max_num_batched_tokens=budget) as rt:
        outputs = rt.generate(prompts, greedy(COUNT))
        assert hits(outputs) == [(0, None), *[(70, "junction")] * 3]
        assert [output.cache_miss_reason for output in outputs] == ["cold", None, None, None]
        assert num_prompt_tokens(rt, 4) == 70 + 10 + 10 + 12 + 5
        assert tokens_of(outputs) == solo_tokens(kind, prompts, [COUNT] * 4)
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize(
    ("own", "lengths"),
    [
        ((0, 0, 0, 0), [69, 69, 69]),  # equal ones: all but the last token
        ((0, 8, 9), [70, 70]),  # longer: the leader's whole prompt, at its end
        ((20, 0), [69]),  # a prefix of the leader's
    ],
)
def test_equal_longer_and_shorter_ones(own: tuple[int, ...], lengths: list[int], rng: np.random.Generator) -> None:
    prompts = family(rng, 70, *own)
    with runtime_of("kda") as rt:
        outputs = rt.generate(prompts, greedy(COUNT))
        assert [output.num_cached_tokens for output in outputs] == [0, *lengths]
        assert num_prompt_tokens(rt, len(prompts)) == sum(map(len, prompts)) - sum(lengths)
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [COUNT] * len(prompts))
        assert_content(rt)
        assert_idle(rt)


def test_a_chain_of_followers(rng: np.random.Generator) -> None:
    """The third waits for the second, which waits for the first."""
    first, second = family(rng, 50, 30, 60)
    third = [*second[:100], *random_tokens(rng, 9)]
    with runtime_of("kda", max_num_batched_tokens=20) as rt:
        outputs = rt.generate([first, second, third], greedy(COUNT))
        assert hits(outputs) == [(0, None), (50, "junction"), (100, "junction")]
        assert num_prompt_tokens(rt, 3) == 80 + 60 + 9
        assert tokens_of(outputs) == solo_tokens("kda", [first, second, third], [COUNT] * 3)
        assert_idle(rt)


def test_too_little_in_common_is_not_waited_for(rng: np.random.Generator) -> None:
    prompts = family(rng, 31, 10, 10)
    with runtime_of("kda") as rt:
        for prompt in prompts:
            rt.add_request(prompt, greedy(COUNT))
        rt.step()
        assert rt.stats().scheduler.num_running == 2
        assert {output.num_cached_tokens for outputs in drain(rt).values() for output in outputs} == {0}
    with runtime_of("kda", min_saving=31) as rt:
        assert hits(rt.generate(prompts, greedy(COUNT)))[1] == (31, "junction")


def test_who_comes_after_the_leader_has_passed_does_not_wait(rng: np.random.Generator) -> None:
    leader, late = family(rng, 60, 70, 10)
    with runtime_of("kda", max_num_batched_tokens=32) as rt:
        rt.add_request(leader, greedy(COUNT))
        rt.step()
        rt.step()  # 64 of 130 tokens
        request_id = rt.add_request(late, greedy(COUNT))
        rt.step()
        assert rt.stats().scheduler.num_running == 2
        [output] = drain(rt)[request_id][-1:]
        assert (hits([output]), output.cache_miss_reason) == ([(0, None)], "cold")
        assert tokens_of([output]) == solo_tokens("kda", [late], [COUNT])
        assert_idle(rt)


def test_others_pass_a_request_that_waits(rng: np.random.Generator) -> None:
    leader, follower = family(rng, 60, 10, 10)
    with runtime_of("kda", max_num_batched_tokens=20) as rt:
        ids = [rt.add_request(prompt, greedy(COUNT)) for prompt in (leader, follower, random_tokens(rng, 10))]
        rt.step()
        assert [request.request_id for request in rt._engine.scheduler.running] == [ids[0], ids[2]]
        drain(rt)
        assert_idle(rt)


@pytest.mark.parametrize("event", ["abort", "preempt", "error"])
def test_when_the_leader_goes_the_first_follower_leads(
    event: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the leader had computed is not computed again, unless its forward failed."""
    prompts = family(rng, 70, 10, 11, 12)
    with runtime_of("kda", max_num_batched_tokens=30) as rt:
        ids = [rt.add_request(prompt, greedy(COUNT)) for prompt in prompts]
        rt.step()
        scheduler = rt._engine.scheduler
        [leader] = scheduler.running
        assert [request.following.leader for request in scheduler.waiting if request.following] == [leader] * 2
        if event == "abort":
            rt.abort(ids[0])
        elif event == "preempt":
            scheduler.preempt(leader)
        ended_early: list[RequestOutput] = []
        if event == "error":
            with monkeypatch.context() as patch:
                patch.setattr(rt.model, "prefill", _raise)
                ended_early += rt.step()
        ended_early += rt.step()
        [running] = scheduler.running
        assert running.request_id == (ids[0] if event == "preempt" else ids[1])
        delivered = drain(rt)
        delivered |= {output.request_id: [output] for output in ended_early if output.finished}
        ended = [delivered[request_id][-1] for request_id in ids]
        alive = ended if event == "preempt" else ended[1:]
        assert tokens_of(alive) == solo_tokens("kda", prompts, [COUNT] * 3)[-len(alive) :]
        assert ended[0].outputs[0].finish_reason == {"abort": "abort", "preempt": "length", "error": "error"}[event]
        assert hits(alive)[1:] == [(70, "junction")] * (len(alive) - 1)
        wasted = 30 if event == "error" else 0
        own = 11 + 12 + (10 if event == "preempt" else 0)
        assert num_prompt_tokens(rt, len(alive)) == 70 + own + wasted
        assert_content(rt)
        assert_idle(rt)


def _raise(*arguments: object) -> torch.Tensor:
    raise RuntimeError("planted")


@pytest.mark.parametrize("num_states", [1, 2, 3, 4])
def test_without_a_slot_for_the_checkpoint_each_computes_for_itself(num_states: int, rng: np.random.Generator) -> None:
    prompts = family(rng, 50, 10, 11, 12)
    with runtime_of("kda", num_state_slots=num_states, max_num_seqs=1 if num_states == 1 else 3) as rt:
        outputs = rt.generate(prompts, greedy(COUNT))
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [COUNT] * 3)
        if num_states == 1:
            assert hits(outputs) == [(0, None)] * 3
        assert rt.stats().cache.num_skipped_checkpoints
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_with_few_rows(max_num_seqs: int, rng: np.random.Generator) -> None:
    """Those that no row is free for come later, and the state is still there."""
    prompts = family(rng, 70, 10, 10, 12, 5)
    with runtime_of("kda", max_num_seqs=max_num_seqs, max_num_batched_tokens=16) as rt:
        outputs = rt.generate(prompts, greedy(COUNT))
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [COUNT] * 4)
        if max_num_seqs == 2:
            assert num_prompt_tokens(rt, 4) == 70 + 10 + 10 + 12 + 5
        assert_idle(rt)


def test_priorities_and_shared_prefixes(rng: np.random.Generator) -> None:
    """A more urgent request that comes later waits for the state all the same: it is the faster way."""
    prompts = family(rng, 70, 10, 10, 10)
    with runtime_of("kda", max_num_batched_tokens=30) as rt:
        ids = [rt.add_request(prompts[0], greedy(COUNT), priority=5)]
        rt.step()
        ids += [
            rt.add_request(prompt, greedy(COUNT), priority=p) for prompt, p in zip(prompts[1:], (3, 0), strict=True)
        ]
        delivered = drain(rt)
        outputs = [delivered[request_id][-1] for request_id in ids]
        assert hits(outputs) == [(0, None), (70, "junction"), (70, "junction")]
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [COUNT] * 3)
        assert num_prompt_tokens(rt, 3) == 70 + 30
        assert_idle(rt)


def test_prompt_logprobs_lead_but_do_not_follow(rng: np.random.Generator) -> None:
    """Every token of theirs must run; the others need not compute it again."""
    prompts = family(rng, 70, 10, 10, 10)
    wanted = greedy(COUNT, prompt_logprobs=0)
    with runtime_of("kda", max_num_batched_tokens=40) as rt:
        outputs = rt.generate(prompts, [wanted, greedy(COUNT), wanted])
        assert hits(outputs) == [(0, None), (70, "junction"), (0, None)]
        assert outputs[2].cache_miss_reason == "prompt_logprobs"
        assert all(output.prompt_logprobs and len(output.prompt_logprobs) == 80 for output in outputs[::2])
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [COUNT] * 3)
        assert_idle(rt)


def test_samples_of_prompts_that_share_tokens(rng: np.random.Generator) -> None:
    prompts = family(rng, 70, 10, 11)
    params = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=9, n=3, ignore_eos=True)
    results = {}
    for enabled in (False, True):
        with runtime_of("kda", enable_prefix_cache=enabled, max_num_batched_tokens=30) as rt:
            outputs = rt.generate(prompts, params)
            results[enabled] = [sample.token_ids for output in outputs for sample in output.outputs]
            if enabled:
                assert num_prompt_tokens(rt, 6) == 70 + (10 + 2) + (11 + 2)
                assert_idle(rt)
    assert results[True] == results[False]

"""Sections 3.2 and 6 of the source document: copy on write, and its end-to-end example, on a model with KDA layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch

from hybrid_runtime import HybridRuntime, RequestOutput
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.scheduling.request import Request
from tests.cache.helpers import checkpoint, ints
from tests.engine.helpers import assert_idle, greedy, poison_free_slots, runtime_of, solo_tokens, tokens_of
from tests.examples.parts import (
    SYSTEM,
    TELL_ME_A_JOKE,
    WRITE_PYTHON_CODE,
    HashedEngine,
    edge,
    edges,
    hand_out_first,
    letters,
    slots,
    state_of,
)

REQUEST_1 = SYSTEM + TELL_ME_A_JOKE  # 40 tokens
REQUEST_2 = SYSTEM + WRITE_PYTHON_CODE  # 45
WARM = {edge(SYSTEM[:29], slots(1, 29), 2, "hint"), edge(SYSTEM[29:], [30], 1, "hint")}


@pytest.fixture
def rt() -> Iterator[HybridRuntime]:
    """A runtime that has been warmed up with the system prompt."""
    with runtime_of("kda", num_kv_slots=400, num_state_slots=80) as rt:
        rt.warmup(list(SYSTEM))
        yield rt
        assert_idle(rt)


def give_first(rt: HybridRuntime, *, kv: Sequence[int], states: Sequence[int]) -> None:
    hand_out_first(rt._engine.memory.supply.kv, kv)
    hand_out_first(rt._engine.memory.supply.states, states)


def start(rt: HybridRuntime, prompt: Sequence[int], max_tokens: int) -> tuple[Request, list[int]]:
    """Queues a request and runs its first step; returns it with its row of the request table."""
    rt.add_request(list(prompt), greedy(max_tokens))
    rt.step()
    [request] = rt._engine.scheduler.running
    residence = request.resident
    return request, rt._engine.memory.table.slots[residence.row, : residence.num_kv_slots].tolist()


def finish(rt: HybridRuntime) -> RequestOutput:
    outputs: list[RequestOutput] = []
    while rt.has_unfinished:
        outputs = rt.step()
    [output] = outputs
    return output


def test_section_3_2_copy_on_write(rt: HybridRuntime) -> None:
    """The document: the state at a match is copied, right before the forward, to a new slot that the request updates.

    Nothing to correct: the tree's slot 1 still holds the state after the system prompt when the request has ended.
    """
    engine = rt._engine
    engine.scheduler.max_num_batched_tokens = 4  # so that the lock of the match outlives the first step
    give_first(rt, kv=[], states=[50, 51])
    of_the_tree = state_of(rt, 1)
    poison_free_slots(rt)
    rt.add_request(list(REQUEST_1), greedy(3))

    step = engine.scheduler.schedule()
    [admission] = step.admissions
    residence = admission.request.resident
    assert (admission.copied_from, residence.working_slot) == (1, 50)
    assert residence.receipt.holds_state, "the source must not be evicted before it is copied"
    assert all(tensor.isnan().all() for tensor in state_of(rt, 50)), "the copy is put off until the forward"
    engine.runner.launch(dataclasses.replace(engine.runner.prepare(step), prefill=None, decode=None))
    assert all(map(torch.equal, state_of(rt, 50), of_the_tree))
    engine.scheduler.reset(step)

    [request] = engine.scheduler.waiting
    rt.step()
    assert (request.resident.working_slot, request.num_computed_tokens) == (50, 34)
    assert request.resident.receipt.node.length == 30
    assert not request.resident.receipt.holds_state, "a running request would pin a state"
    assert not any(map(torch.equal, state_of(rt, 50), of_the_tree))
    finish(rt)
    assert all(map(torch.equal, state_of(rt, 1), of_the_tree))


def test_section_6_1_warm_up(rt: HybridRuntime) -> None:
    """The document generates one token and caches 31 tokens with the state in slot 1.

    That state would be past the prompt, of no use to any request that goes on otherwise. A warm-up samples nothing: KV
    1..30, the state after 30 tokens in slot 1, and one after 29, for a request that is the prompt and nothing else.
    """
    assert edges(rt._engine.memory.cache) == WARM
    assert rt._engine.num_prefill_tokens == 30
    assert rt._engine.num_decode_tokens == 0
    assert rt.generate([*SYSTEM, 101], greedy(1))[0].num_cached_tokens == 30
    assert rt.generate(list(SYSTEM), greedy(1))[0].num_cached_tokens == 29


def test_section_6_1_the_stable_border() -> None:
    """The document warms up with text. Text that follows may change its last tokens, so one more state is kept before.

    The last word of these 9 tokens is " ass", "ist", "ant"; with an "s" behind it, it ends otherwise.
    """
    text = "You are a helpful assistant"
    with HybridRuntime("tiny", debug_checks=True, compile="off") as rt:
        rt.warmup(text)
        lengths = sorted(node.length for node in rt.prefix_cache.nodes() if node.state_slot is not None)
        assert lengths == [6, 8, 9]
        hits = [rt.generate(text + more, max_tokens=1)[0].num_cached_tokens for more in ("s", ".", "")]
        assert hits == [8, 9, 8]


def test_section_6_2_request_1(rt: HybridRuntime) -> None:
    """The document: 30 of 40 tokens hit, slot 1 is copied to 50, 5 tokens are generated, and 45 tokens are cached.

    The 5th was never computed: KV (100..113) and state cover 44. The prompt's tail at 39 has a state of its own, and
    the tree had no token of a warm-up's output to split off.
    """
    give_first(rt, kv=slots(100, 114), states=[50, 51])
    request, row = start(rt, REQUEST_1, 5)
    assert row == slots(1, 30) + slots(100, 109)
    assert request.resident.working_slot == 50
    assert rt._engine.num_prefill_tokens == 30 + 10
    assert request.resident.track_slots == [], "5 tokens reach no boundary of 256"

    output = finish(rt)
    assert (output.num_cached_tokens, output.checkpoint_origin) == (30, "hint")
    [tokens] = tokens_of([output])
    assert edges(rt._engine.memory.cache) == WARM | {
        edge(TELL_ME_A_JOKE[:9], slots(100, 108), 51, "tail"),
        edge([TELL_ME_A_JOKE[9], *tokens[:4]], slots(109, 113), 50, "final"),
    }
    assert rt._engine.memory.supply.kv.is_free(114)
    following = rt.generate([*REQUEST_1, *tokens, 101], greedy(1))[0]
    assert (following.num_cached_tokens, following.checkpoint_origin) == (44, "final")


def test_section_6_3_request_2(rt: HybridRuntime) -> None:
    """The document: 30 of 45 tokens hit again, slot 1 is copied to 60, and 15 tokens are computed instead of 45.

    Nothing to correct; and the output is that of a run without any cache.
    """
    rt.generate(list(REQUEST_1), greedy(5))
    before = rt._engine.num_prefill_tokens
    give_first(rt, kv=slots(200, 214), states=[60, 61])
    request, row = start(rt, REQUEST_2, 4)
    assert row == slots(1, 30) + slots(200, 214)
    assert request.resident.working_slot == 60
    assert rt._engine.num_prefill_tokens - before == 15

    output = finish(rt)
    assert (output.num_cached_tokens, output.num_kv_matched_tokens) == (30, 30)
    assert tokens_of([output]) == solo_tokens("kda", [REQUEST_2], [4])
    with runtime_of("kda") as cold:
        cold.generate(list(REQUEST_2), greedy(4))
        assert cold._engine.num_prefill_tokens == 45


def test_section_6_4_the_long_cannot_serve_the_short() -> None:
    """The document: with only ABCDEFGH cached, ABCD matches 4 tokens, splits the node and can reuse nothing.

    Nothing can be reused, true. But a lookup only reads, and it leaves out the last token, which must run.
    """
    cache = RadixCache("lru")
    cache.insert(ints(letters("ABCDEFGH")), ints(slots(1, 8)), [checkpoint(8, 1)])
    before = edges(cache)
    found = cache.match(ints(letters("ABCD")))
    assert (found.state_length, found.kv_length, found.kv_slots.tolist()) == (0, 3, [])
    assert found.node is cache.root
    assert edges(cache) == before == {edge(letters("ABCDEFGH"), slots(1, 8), 1, "tail")}


def test_section_6_4_attention_cannot_reuse_the_kv() -> None:
    """The document: attention can still reuse the KV of ABCD; only the recurrent layers start from nothing.

    They need every layer's input, so all 4 tokens are computed in all layers. Only the room is shared: the request's
    KV of A, B and C are duplicates, and the tree is split when its own state is attached, at 3.
    """
    engine = HashedEngine()
    engine.hand_out_first(kv=slots(1, 8), states=[1, 2])
    engine.add("long", letters("ABCDEFGH"))
    engine.run()
    engine.hand_out_first(kv=slots(20, 23), states=[3, 4])
    computed = engine.engine.num_prefill_tokens
    [request] = engine.add("short", letters("ABCD"), max_tokens=2).requests
    engine.step()
    hit = request.prefix_hit
    assert hit is not None
    assert (hit.num_cached_tokens, hit.num_kv_matched_tokens) == (0, 3)
    assert (hit.checkpoint_origin, hit.cache_miss_reason) == (None, "no_state_on_path")
    assert engine.engine.num_prefill_tokens - computed == 4
    assert engine.row(request) == [1, 2, 3, 23]
    assert edges(engine.cache) == {
        edge(letters("ABC"), [1, 2, 3], 4, "tail"),
        edge(letters("DEFG"), [4, 5, 6, 7], 2, "tail"),
        edge(letters("H"), [8], 1, "final"),
    }
    engine.run()

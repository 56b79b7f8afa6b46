"""Sections 3.1 and 4.1 to 4.3 of the source document: sharing KV, and prefill in one chunk and in several."""

from __future__ import annotations

from hybrid_runtime.scheduling.placement import CheckpointPolicy
from tests.cache.helpers import freed_sets, ints
from tests.examples.parts import (
    CODING_EXPERT,
    HELPFUL_ASSISTANT,
    SYSTEM,
    TELL_ME_A_JOKE,
    WRITE_CODE,
    YOU_ARE_A,
    HashedEngine,
    edge,
    edges,
    letters,
    slots,
)

EVERY_4 = CheckpointPolicy(checkpoint_interval=4)


def test_section_3_1_one_copy_of_a_shared_prefix() -> None:
    """The document: A and B have KV slots 10..39 in their rows, there is one copy, and locks keep it.

    Nothing to correct. What they do not share is in slots of their own.
    """
    engine = HashedEngine()
    engine.hand_out_first(kv=slots(10, 39))
    engine.warm_up(SYSTEM)
    engine.hand_out_first(kv=slots(100, 140))
    [a] = engine.add("A", SYSTEM + TELL_ME_A_JOKE, max_tokens=3).requests
    [b] = engine.add("B", SYSTEM + WRITE_CODE, max_tokens=3).requests
    engine.step()

    assert engine.row(a) == slots(10, 39) + slots(100, 109)
    assert engine.row(b) == slots(10, 39) + slots(110, 120)
    assert engine.memory.supply.kv.num_free == 300 - (30 + 10 + 11)
    shared = next(node for node in engine.cache.nodes() if node.length == 30)
    assert shared.kv_lock == 2
    assert freed_sets(engine.cache.evict_kv(1000)) == ([], [])

    engine.run()
    freed = engine.cache.evict_kv(1000)
    assert set(slots(10, 39)) < set(freed.kv_slots.tolist())


def test_section_4_1_a_short_prompt() -> None:
    """The document: 10 of 30 tokens are in the tree with a state, 20 are computed, and the end donates a track slot.

    The first three hold. The states that stay come from elsewhere: the forward writes the one before the last token
    (the same prompt again can skip no more), and the end donates the working slot itself.
    """
    engine = HashedEngine()
    engine.hand_out_first(kv=slots(10, 19), states=[1, 2])
    engine.warm_up(YOU_ARE_A)
    engine.hand_out_first(kv=slots(100, 120), states=[3, 4])
    found = engine.cache.match(ints(SYSTEM))
    assert (found.state_length, found.kv_slots.tolist(), found.state_slot) == (10, slots(10, 19), 1)

    computed = engine.engine.num_prefill_tokens
    [request] = engine.add("R", SYSTEM, max_tokens=2).requests
    engine.step()
    assert engine.row(request) == slots(10, 19) + slots(100, 119)
    assert engine.engine.num_prefill_tokens - computed == 20
    assert request.resident.working_slot == 3
    assert request.resident.track_slots == []

    engine.run()
    output = request.tokens.output.tolist()
    assert edges(engine.cache) == {
        edge(YOU_ARE_A[:9], slots(10, 18), 2, "hint"),
        edge(YOU_ARE_A[9:], [19], 1, "hint"),
        edge(HELPFUL_ASSISTANT[:19], slots(100, 118), 4, "tail"),
        edge([HELPFUL_ASSISTANT[19], output[0]], [119, 120], 3, "final"),
    }


def test_section_4_2_a_prompt_in_chunks() -> None:
    """The document: chunks of 4, and each leaves its KV and a state in the tree, where the next one finds them.

    A state per chunk costs a slot each, so it takes `checkpoint_interval=4`. There is no second lookup: the request
    keeps its working slot, and its row and lock move to what the tree has taken. It reserves KV for the whole prompt
    when it is admitted. Behind the last chunk its state is the request's until it ends; the tail is at 7.
    """
    engine = HashedEngine(policy=EVERY_4, max_num_batched_tokens=4)
    engine.hand_out_first(kv=[*slots(10, 13), *slots(20, 23)], states=[90, 100, 101])
    [request] = engine.add("A", letters("ABCDEFGH")).requests

    engine.step()
    residence = request.resident
    assert engine.row(request) == [*slots(10, 13), *slots(20, 23)]
    assert edges(engine.cache) == {edge(letters("ABCD"), slots(10, 13), 100, "interval")}
    assert (residence.working_slot, residence.protected_length) == (90, 4)
    assert (residence.receipt.node.length, residence.receipt.node.kv_lock) == (4, 1)
    assert not residence.receipt.holds_state

    engine.step()
    assert edges(engine.cache) == {
        edge(letters("ABCD"), slots(10, 13), 100, "interval"),
        edge(letters("EFG"), slots(20, 22), 101, "tail"),
        edge(letters("H"), [23], 90, "final"),
    }
    assert engine.engine.num_prefill_tokens == 8


def test_section_4_2_without_an_interval() -> None:
    """The document leaves a state at each chunk's end; by default, a chunk that does not end the prompt leaves none."""
    engine = HashedEngine(max_num_batched_tokens=4)
    engine.hand_out_first(kv=[*slots(10, 13), *slots(20, 23)], states=[90, 101])
    engine.add("A", letters("ABCDEFGH"))
    engine.step()
    assert edges(engine.cache) == set()
    engine.run()
    assert edges(engine.cache) == {
        edge(letters("ABCDEFG"), [*slots(10, 13), *slots(20, 22)], 101, "tail"),
        edge(letters("H"), [23], 90, "final"),
    }


def test_section_4_3_duplicates_are_freed() -> None:
    """The document: B has cached ABCDEF between A's chunks, so A's own KV of E and F, slots 20 and 21, is freed.

    It is, and A's row names B's slots 30 and 31. That happens at A's next checkpoint (at 7, not 8), and its state is
    one of that length. Slots 10..13 are below the protected length and are not touched.
    """
    engine = HashedEngine(policy=EVERY_4, max_num_batched_tokens=4)
    engine.hand_out_first(kv=[*slots(10, 13), *slots(20, 23), *slots(30, 32)], states=[90, 100, 91, 105, 101])
    [a] = engine.add("A", letters("ABCDEFGH"), max_tokens=2).requests
    engine.step()
    [b] = engine.add("B", letters("ABCDEFX"), max_tokens=5).requests
    engine.step()  # two tokens for each: E and F
    assert engine.row(a) == [10, 11, 12, 13, 20, 21, 22, 23]
    assert engine.row(b) == [10, 11, 12, 13, 30, 31, 32]
    assert edges(engine.cache) == {
        edge(letters("ABCD"), slots(10, 13), 100, "interval"),
        edge(letters("EF"), [30, 31], 105, "tail"),
    }

    engine.step()  # G and H
    assert engine.row(a) == [10, 11, 12, 13, 30, 31, 22, 23]
    assert {20, 21} <= set(engine.memory.supply.kv.free_slots().tolist())
    assert edge(letters("G"), [22], 101, "tail") in edges(engine.cache)
    assert a.resident.protected_length == 7
    engine.run()
    final = engine.cache.match(ints([*letters("ABCDEFGH"), *a.tokens.output.tolist()]))
    assert (final.state_length, final.state_slot) == (9, 90)


def test_section_4_3_states_can_be_duplicates_too() -> None:
    """The document only frees KV; where two requests compute the same, the second one's states come back as well."""
    engine = HashedEngine()
    engine.hand_out_first(kv=[*slots(10, 34), *slots(40, 64)], states=[1, 2, 3, 4])
    for name in "AB":
        engine.add(name, YOU_ARE_A + CODING_EXPERT)
    engine.step()
    assert edges(engine.cache) == {
        edge(YOU_ARE_A + CODING_EXPERT[:14], slots(10, 33), 3, "tail"),
        edge(CODING_EXPERT[14:], [34], 1, "final"),
    }
    assert not engine.engine.groups
    assert engine.memory.supply.kv.num_free == 300 - 25
    assert engine.memory.supply.states.num_free == 120 - 2

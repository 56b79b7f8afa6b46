"""Sections 3.4 and 5.1 of the source document: ping-pong track slots, and decoding one token at a time."""

from __future__ import annotations

import numpy as np
import torch

from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.request import Request
from tests.cache.helpers import ints, state_contents
from tests.engine.hashing_runner import content
from tests.engine.helpers import assert_idle, greedy, random_tokens, runtime_of, solo_tokens, tokens_of
from tests.examples.parts import HashedEngine, letters, state_of

PING, PONG = 7, 8
PROMPT = letters("ABCDEF")


def boundaries(engine: HashedEngine, request: Request, last: int) -> dict[int, tuple[int, list[int]]]:
    """Decodes up to a length: at which lengths a state was kept, in which slot, and what the request owned then."""
    seen: dict[int, tuple[int, list[int]]] = {}
    while request.num_computed_tokens < last:
        engine.step()
        tracked = request.tracked
        if tracked is not None:
            assert engine.runner.states[tracked.state_slot] == content(request.tokens[: tracked.length])
            seen.setdefault(tracked.length, (tracked.state_slot, sorted(request.resident.state_slots)))
    return seen


def test_section_3_4_ping_pong() -> None:
    """The document: a working slot and two track slots; periodic states alternate between ping and pong.

    They do, but a slot is only taken when the first boundary that needs it comes, not at admission.
    """
    engine = HashedEngine(policy=CheckpointPolicy(track_interval=4, num_track_slots=2))
    engine.hand_out_first(states=[1, 2, PING, PONG])
    [request] = engine.add("R", PROMPT, max_tokens=20).requests
    engine.step()
    assert request.resident.state_slots == [1]
    assert boundaries(engine, request, 17) == {
        8: (PING, [1, PING]),
        12: (PONG, [1, PING, PONG]),
        16: (PING, [1, PING, PONG]),
    }


def test_section_3_4_the_last_one_is_readable_while_the_next_is_written() -> None:
    """The document: the cache reads one buffer while the forward writes the other one.

    So the step that writes PONG must leave the state at 8 in PING untouched. With one slot (the default, as steps do
    not overlap) that state is given up when the step is scheduled, and is not offered to anybody after that.
    """
    for num_track_slots, readable in ((2, PING), (1, None)):
        engine = HashedEngine(policy=CheckpointPolicy(track_interval=4, num_track_slots=num_track_slots))
        engine.hand_out_first(states=[1, 2, PING, PONG])
        [request] = engine.add("R", PROMPT, max_tokens=20).requests
        boundaries(engine, request, 11)
        step = engine.engine.scheduler.schedule()
        assert step.decode[0].checkpoint is not None
        assert step.decode[0].checkpoint.length == 12
        assert step.decode[0].checkpoint.state_slot == (PONG if readable == PING else PING)
        tracked = request.tracked
        assert (None if tracked is None else tracked.state_slot) == readable
        engine.runner.launch(engine.runner.prepare(step))
        if tracked is not None:
            assert engine.runner.states[tracked.state_slot] == content(request.tokens[:8])
        assert step.decode[0].checkpoint.state_slot in request.resident.track_slots
        engine.engine.scheduler.reset(step)
        assert engine.memory.supply.states.num_free == 120 - 1, "all but the tail's are free again"


def test_section_3_4_the_end_keeps_two_states() -> None:
    """The document ends with the last periodic state going to the tree; its working slot is just released.

    Then a finished turn could not be resumed where it ended. Both go to the tree, the other track slot is released.
    """
    engine = HashedEngine(policy=CheckpointPolicy(track_interval=4, num_track_slots=2))
    engine.hand_out_first(states=[1, 2, PING, PONG])
    [request] = engine.add("R", PROMPT, max_tokens=9).requests
    engine.run()
    tokens = tuple(request.tokens[:].tolist())
    assert len(tokens) == 15
    assert state_contents(engine.cache) == {
        tokens[:5]: (2, "tail"),
        tokens[:12]: (PONG, "track"),
        tokens[:14]: (1, "final"),
    }
    assert engine.memory.supply.states.is_free(PING)


def test_section_5_1_one_token_at_a_time() -> None:
    """The document: a step adds one KV slot and updates the state in place; every 256 tokens it is copied.

    The copy at 256 is the state after exactly 256 tokens. At the end the document takes that copy for the whole
    sequence; here it stays what it is, and the working slot gives the state after all 259 computed tokens.
    """
    rng = np.random.default_rng(3)
    prompt = random_tokens(rng, 250)
    with runtime_of("kda") as rt, runtime_of("kda") as other:
        assert rt.config.track_interval == 256
        rt.add_request(prompt, greedy(10), request_id="R")
        rt.step()
        [request] = rt._engine.scheduler.running
        working_slot = request.resident.working_slot
        while request.num_computed_tokens < 258:
            before, num_kv = state_of(rt, working_slot), request.resident.num_kv_slots
            rt.step()
            assert request.resident.num_kv_slots == num_kv + 1
            assert request.resident.working_slot == working_slot
            assert not all(map(torch.equal, before, state_of(rt, working_slot)))
            tracked = request.tracked
            assert (tracked is not None) == (request.num_computed_tokens >= 256)
        rt.step()
        assert not rt.has_unfinished
        tokens = request.tokens[:].tolist()
        states = state_contents(rt._engine.memory.cache)
        assert {len(prefix): origin for prefix, (_, origin) in states.items()} == {
            249: "tail",
            256: "track",
            259: "final",
        }

        other.warmup(tokens[:256])
        expected = other.prefix_cache.match(ints([*tokens[:256], 3])).state_slot
        assert expected is not None
        tracked_slot, _ = states[tuple(tokens[:256])]
        for ours, theirs in zip(state_of(rt, tracked_slot), state_of(other, expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

        # A turn that is cut behind 257 tokens resumes at 256, with the same output as if nothing had been cached.
        cut = [*tokens[:257], *random_tokens(rng, 9)]
        [resumed] = rt.generate(cut, greedy(6))
        assert (resumed.num_cached_tokens, resumed.checkpoint_origin) == (256, "track")
        assert tokens_of([resumed]) == solo_tokens("kda", [cut], [6])
        assert_idle(rt)

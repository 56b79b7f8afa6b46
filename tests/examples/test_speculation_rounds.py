"""Sections 8.3, 8.4, 8.6 and 9.2 to 9.11 of the source document: what a round reads, writes and leaves alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hybrid_runtime.models.rollback import NODE_STATES
from hybrid_runtime.models.tree_forms import DeltaForms
from tests.cache.helpers import state_contents
from tests.engine.helpers import assert_idle
from tests.examples.parts import edges, state_of
from tests.examples.speculation_parts import (
    ACCEPTED,
    PARENTS,
    RIGHT_PATH,
    ROLLBACKS,
    Rounds,
    ScriptedDrafter,
    assert_close,
    finish,
    kv_content,
    same_bits,
    speculative_runtime,
    start,
    stepwise_states,
    truth_of,
)

PROMPT_LEN = 9
TRUTH = (PROMPT_LEN, 24)  # arguments of truth_of
CHAIN = (0, 1, 2, 3, 4, 5, 6)
REJECTED = sorted(set(range(10)) - set(ACCEPTED))


def of_row(layer: Mapping[str, Tensor], row: int) -> list[Tensor]:
    """What the verify of one request left in a layer: states are by places in the batch, all else by table rows."""
    return [record[0 if name == NODE_STATES else row] for name, record in layer.items()]


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_section_8_3_the_main_state_is_untouched_until_the_verdict(rollback: str) -> None:
    """The document: the verify runs with `disable_state_update=True`, and results go to an intermediate buffer.

    So it is, for all slots and all layers, conv windows included, and for the KV of the tokens before the tree. (The
    states of the nodes are written somewhere with `snapshot` and `replay` only: see 8.4, 9.5.)
    """
    truth = truth_of(*TRUTH)
    with speculative_runtime(rollback, ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)
        request, kv = rounds.request, kv_content(rt)
        committed = rt._engine.memory.table.slots[request.resident.row, :PROMPT_LEN].copy()
        assert finish(rt) == truth[PROMPT_LEN:]

        verifies = [place for place, name in enumerate(rounds.names()) if name == "verify"]
        assert len(verifies) > 2
        for place in verifies:
            before, after = rounds.events[place - 1], rounds.events[place]
            assert before.name == "before verify"
            assert same_bits(before.states, after.states)
        assert not same_bits(rounds.events[verifies[0]].working, rounds.events[verifies[1]].working)
        for old, new in zip(kv, kv_content(rt), strict=True):
            assert same_bits([old[committed]], [new[committed]])


def test_section_8_4_the_scatter_takes_the_state_of_a_node() -> None:
    """The document: a buffer `[layers, requests + 1, draft tokens, ...]`; afterwards
    `main_state[layer, slot] = buffer[layer, req, accepted_step]`.

    Bit by bit, with a tensor per layer. What it calls a step is a node: of the path d1, d7 it is node 8. Entry 2, two
    steps below the root, holds the state behind d1. The conv window, of which the document's buffer has none, is made
    of the inputs of the path.
    """
    truth = truth_of(*TRUTH)
    last = ACCEPTED[-1]
    with speculative_runtime("snapshot", ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)
        rt.step()
        slot = rounds.request.resident.working_slot
        assert rounds.request.num_computed_tokens == PROMPT_LEN + len(ACCEPTED)
        for records, layer in zip(rounds.records, rt._engine.memory.state_pool.layers, strict=True):
            buffer = records[NODE_STATES]
            assert buffer.shape == (1 + rt.config.max_num_seqs, len(PARENTS) + 1, *layer["kda"].shape[1:])
            assert same_bits([layer["kda"][slot]], [buffer[0, last]])
            assert not same_bits([layer["kda"][slot]], [buffer[0, len(RIGHT_PATH)]])
            window = records["conv_inputs"][rounds.request.resident.row, list(ACCEPTED)]
            assert same_bits([layer["conv"][slot, -len(ACCEPTED) :]], [window])
        assert_close(state_of(rt, slot), stepwise_states(truth, PROMPT_LEN)[PROMPT_LEN + len(ACCEPTED)])


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_section_8_6_and_9_10_a_boundary_inside_an_accepted_run(rollback: str) -> None:
    """The document: where an accepted run crosses 256, the state there also goes to the ping-pong buffer, at the end
    to the tree; the tree is not modified before.

    The state there is that after exactly 256 tokens, whichever way it was made. At the end the working slot goes to the
    tree, too, at its own length: the document would keep the state at 256 alone.
    """
    prompt_len, truth = 250, truth_of(250, 15)
    with speculative_runtime(rollback, ScriptedDrafter(truth, CHAIN, range(1, 8))) as rt:
        rounds = Rounds(rt)
        assert rt.config.track_interval == 256
        start(rt, truth, prompt_len)
        request, before = rounds.request, edges(rt._engine.memory.cache)
        rt.step()
        assert request.num_computed_tokens == 258
        assert request.tracked is not None
        assert request.tracked.length == 256
        assert edges(rt._engine.memory.cache) == before
        assert finish(rt) == truth[prompt_len:]

        states = state_contents(rt._engine.memory.cache)
        assert {len(prefix): origin for prefix, (_, origin) in states.items()} == {
            249: "tail",
            256: "track",
            264: "final",
        }
        expected = stepwise_states(truth, prompt_len)
        for length in (256, 264):
            slot, _ = states[truth[:length]]
            assert_close(state_of(rt, slot), expected[length])
        assert_idle(rt)


@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize(("interval", "lengths"), [(17, [17]), (16, [16]), (4, [16])])
def test_section_9_10_a_boundary_at_the_end_and_several(rollback: str, interval: int, lengths: list[int]) -> None:
    """The document's loop writes the buffer at each multiple it comes by, at the last token of the run as well.

    So does the run from 9 to 17 tokens. Of the multiples 12 and 16 of 4 only the last is written: it would
    overwrite the other one.
    """
    truth = truth_of(*TRUTH)
    with speculative_runtime(
        rollback, ScriptedDrafter(truth, CHAIN, range(1, 8)), track_interval=interval, num_state_slots=4
    ) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)
        rt.step()
        assert rounds.request.num_computed_tokens == 17
        assert [track.length for track in rounds.request.resident.tracks] == lengths
        rt._engine.runner.commits.catch_up()
        [track] = rounds.request.resident.tracks
        assert_close(state_of(rt, track.state_slot), stepwise_states(truth, PROMPT_LEN)[track.length])


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_section_9_4_all_nodes_are_noted_before_the_verdict(rollback: str) -> None:
    """The document: the verdict comes before the saving, so inputs of accepted tokens alone are saved.

    The verdict needs the logits, and these the last layer; the inputs of the first are long gone by then. So those of
    all nodes of all layers are noted. What is true is that those of rejected nodes are not read any more.
    """
    truth = truth_of(*TRUTH)
    with speculative_runtime(rollback, ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)
        of_nodes: list[Tensor] = []

        def spoil(records) -> None:
            of_request = [of_row(layer, rounds.request.resident.row) for layer in records]
            of_nodes.extend(record.clone() for layer in of_request for record in layer)
            for layer in of_request:
                for record in layer:
                    record[REJECTED] = torch.nan

        rounds.after_verify = spoil
        rt.step()
        rounds.after_verify = lambda records: None
        for record in of_nodes:
            assert record.isfinite().all()
            assert len(record.flatten(1).unique(dim=0)) == len(PARENTS) + 1, "each node left something of its own"
        assert len(of_nodes) >= 2 * 3
        assert finish(rt) == truth[PROMPT_LEN:]


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_section_9_4_what_accepted_nodes_left_is_read(rollback: str) -> None:
    """The other half of 9.4: NaN in the records of one accepted node, and the text is lost."""
    truth = truth_of(*TRUTH)
    with speculative_runtime(rollback, ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)

        def spoil(records) -> None:
            for record in records[0].values():
                record[:, ACCEPTED[-1]] = torch.nan

        rounds.after_verify = spoil
        [output] = rt.step()
        assert output.outputs[0].token_ids == truth[PROMPT_LEN : PROMPT_LEN + 1 + len(ACCEPTED)]
        while rt.has_unfinished:
            [output] = rt.step()
        assert output.outputs[0].finish_reason == "error"


def test_section_9_5_one_buffer_for_all_layers() -> None:
    """The document: with `replay` each layer overwrites the same buffer; with `snapshot` none may be.

    All holds: one tensor, which the last layer leaves as that of `snapshot` for this layer. NaN in it, between the
    verify and the next round, is not noticed; NaN in the first layer's own one of `snapshot` is.
    """
    truth = truth_of(*TRUTH)
    left: dict[str, list[Tensor]] = {"replay": [], "snapshot": []}
    outputs = {}
    for rollback, copies in left.items():
        with speculative_runtime(rollback, ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
            rounds = Rounds(rt)
            start(rt, truth, PROMPT_LEN)

            def look_and_spoil(records, copies=copies) -> None:
                if not copies:
                    copies.extend(layer[NODE_STATES][0].clone() for layer in records)
                records[0][NODE_STATES].fill_(torch.nan)

            rounds.after_verify = look_and_spoil
            num_buffers = len({layer[NODE_STATES].data_ptr() for layer in rounds.records})
            assert num_buffers == {"replay": 1, "snapshot": 3}[rollback]
            while rt.has_unfinished:
                [output] = rt.step()
            outputs[rollback] = output.outputs[0]
    assert outputs["replay"].token_ids == truth[PROMPT_LEN:]
    assert outputs["snapshot"].finish_reason == "error"
    last = left["snapshot"][-1]
    assert all(same_bits([last], [buffer]) for buffer in left["replay"])
    assert not same_bits([last], left["snapshot"][:1])


@pytest.mark.parametrize("rollback", ["snapshot", "fold"])
def test_section_9_11_timeline_of_a_commit_at_once(rollback: str) -> None:
    """The document's present scheme: draft from S(t), verify, scatter; the main state is S(t + 1) at once."""
    truth = truth_of(*TRUTH)
    with speculative_runtime(rollback, ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)
        expected = stepwise_states(truth, PROMPT_LEN)
        for number in range(3):
            rounds.events.clear()
            rt.step()
            assert rounds.names() == ["draft", "before verify", "verify", "commit"]
            length = PROMPT_LEN + len(ACCEPTED) * number
            for event in rounds.events[:-1]:
                assert_close(event.working, expected[length])
            assert_close(rounds.events[-1].working, expected[length + len(ACCEPTED)])


def test_section_9_11_timeline_of_a_deferred_commit() -> None:
    """The document's deferred scheme: replay, draft, verify, save; the main state lags by a round.

    It does: S stays where it was until the next round, which begins with the replay, of all requests at once. (9.2 has
    S(t) where 9.9 and 9.11 have S(t - 1) for the same state.)
    """
    truth = truth_of(*TRUTH)
    with speculative_runtime("replay", ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, PROMPT_LEN)
        expected = stepwise_states(truth, PROMPT_LEN)
        rt.step()
        assert rounds.names() == ["draft", "before verify", "verify"]
        for number in range(1, 3):
            rounds.events.clear()
            length = PROMPT_LEN + len(ACCEPTED) * number
            assert rounds.request.num_computed_tokens == length
            slot = rounds.request.resident.working_slot
            assert_close(state_of(rt, slot), expected[length - len(ACCEPTED)])
            rt.step()
            assert rounds.names() == ["commit", "draft", "before verify", "verify"]
            for event in rounds.events:
                assert_close(event.working, expected[length])


def test_section_9_8_how_often_the_update_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document: a replay runs the one-token update layers x accepted times.

    So it does, the root counted among the accepted: 3 layers x 3 tokens, whatever the number of requests.
    """
    truth = truth_of(*TRUTH)
    batches = []
    replay = DeltaForms.replay

    def counted(self, noted, pool, slots_B) -> None:
        batches.append(len(slots_B))
        replay(self, noted, pool, slots_B)

    monkeypatch.setattr(DeltaForms, "replay", counted)
    with speculative_runtime(
        "replay", ScriptedDrafter(truth, PARENTS, RIGHT_PATH), max_num_seqs=2, num_state_slots=12
    ) as rt:
        start(rt, truth, PROMPT_LEN)
        rt.add_request(list(truth[:PROMPT_LEN]), max_tokens=14, temperature=0.0, ignore_eos=True)
        rt.step()
        rt.step()
        batches.clear()
        rt._engine.runner.commits.catch_up()
        assert batches == [2] * (3 * len(ACCEPTED))
        finish(rt)

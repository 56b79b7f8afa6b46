"""Sections 8.4, 8.5, 9.3, 9.7, 9.8 and 9.12 of the source document: its tables, computed again.

Its parameters: 32 layers, 32 requests, 63 nodes (topk 4), 4 accepted tokens, a state of 500K elements and inputs of 10K
per layer and token, bfloat16. "GB" and "MB" are powers of ten, as there.
"""

from __future__ import annotations

import pytest
import torch

from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.rollback import NODE_STATES
from hybrid_runtime.walkthrough.rollback_memory import LAYERS, record_plan, state_bytes, states_moved
from tests.examples.speculation_parts import (
    PARENTS,
    RIGHT_PATH,
    ScriptedDrafter,
    speculative_runtime,
    truth_of,
)

L, N, T, NUM_ACCEPTED = 32, 32, 63, 4
STATE, INPUTS = TensorSpec((500_000,), torch.bfloat16), TensorSpec((10_000,), torch.bfloat16)
GB, MB, US = 1e9, 1e6, 1e-6
KDA, GDN, MAMBA2 = LAYERS
NODES_STATES = frozenset({NODE_STATES})


def document_plan(num_nodes: int = T, *, shared: bool = False, **of_node: TensorSpec) -> RecordPlan:
    """Records of the document's sizes, by the runtime's arithmetic."""
    layer: LayerSpec = {name: TensorSpec((num_nodes, *spec.shape), spec.dtype) for name, spec in of_node.items()}
    return RecordPlan((layer,) * L, N, NODES_STATES if shared else frozenset())


SNAPSHOT = document_plan(node_states=STATE).num_bytes
ALL_INPUTS = document_plan(inputs=INPUTS).num_bytes
REPLAY = document_plan(shared=True, node_states=STATE, inputs=INPUTS).num_bytes


def bytes_of(layer: str, rollback: str, num_nodes: int = T) -> int:
    return record_plan(layer, rollback, num_nodes=num_nodes).num_bytes


def test_the_arithmetic_is_the_runtime_s() -> None:
    """What the tables here add up is what a runtime plans and allocates: of the KDA model in float64, by hand.

    3 layers of 3 heads of 8 x 8; 72 conv channels. There is one row more than requests, for padding.
    """
    truth, num_nodes, num_rows = truth_of(9, 24), 10, 3 + 1
    inputs, state, buffers = 72, 3 * 8 * 8, num_nodes * num_rows * 8
    elements = {
        "fold": 3 * (inputs + 3 * 24),
        "snapshot": 3 * (inputs + state),
        "replay": 3 * (inputs + 3 * 24 + 3) + state,
    }
    for rollback, count in elements.items():
        drafter = ScriptedDrafter(truth, PARENTS, RIGHT_PATH)
        with speculative_runtime(rollback, drafter, max_num_seqs=3, num_state_slots=9) as rt:
            stats, step_memory = rt.stats().speculation, rt._engine.memory.step_memory
            assert stats is not None
            tensors = {id(t): t for layer in step_memory.record_layers for t in layer.values()}.values()
            allocated = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            assert stats.record_bytes == allocated == count * buffers


def test_section_8_5_a_state_per_node() -> None:
    """The document: the buffer takes 3, 7 or 63 times the main state.

    Right: as many times as there are nodes (4 where it says 3: the root is one of them). With conv inputs, which
    a commit needs, it is a little more.
    """
    main = document_plan(1, node_states=STATE).num_bytes
    assert [document_plan(num_nodes, node_states=STATE).num_bytes / main for num_nodes in (3, 7, 63)] == [3, 7, 63]
    for layer in LAYERS:
        for num_nodes in (4, 7, 63):
            times = bytes_of(layer, "snapshot", num_nodes) / (N * state_bytes(layer, num_layers=L))
            assert 0.95 * num_nodes < times < 1.05 * num_nodes


def test_section_9_7_resident_memory_of_the_present_scheme() -> None:
    """The document: 32 x 32 x 63 x 500K x 2 B is "several GB". It is 64.5 GB."""
    assert pytest.approx(64.512 * GB) == SNAPSHOT


def test_section_9_7_resident_memory_of_the_deferred_scheme() -> None:
    """The document: 32 x 4 x 10K x 2 B = 2.5 MB of accepted inputs are left, 1000 times less.

    That is one request's. For 32 requests it is 82 MB, 788 times less; and what is there at start and stays there, of
    all nodes since the verdict is not known before, is 1.29 GB, 50 times less.
    """
    of_one_request = RecordPlan(({"inputs": TensorSpec((NUM_ACCEPTED, 10_000), torch.bfloat16)},) * L, 1).num_bytes
    assert of_one_request == pytest.approx(2.56 * MB)
    accepted = document_plan(NUM_ACCEPTED, inputs=INPUTS).num_bytes
    assert accepted == N * of_one_request == pytest.approx(81.92 * MB)
    assert pytest.approx(787.5) == SNAPSHOT / accepted
    assert pytest.approx(1.29024 * GB) == ALL_INPUTS
    assert pytest.approx(50) == SNAPSHOT / ALL_INPUTS


def test_section_9_7_peak_memory_of_the_deferred_scheme() -> None:
    """The document: the peak is one layer's buffer, 1/32.

    The inputs of all layers are there at the same time: 2.02 GB and 1.29 GB, 19.5 times less. And the peak is what is
    resident, too, as the tensors of compiled and captured steps stay where they are.
    """
    buffer = REPLAY - ALL_INPUTS
    assert buffer == SNAPSHOT // L == pytest.approx(2.016 * GB)
    assert pytest.approx(3.30624 * GB) == REPLAY
    assert pytest.approx(19.51, abs=0.01) == SNAPSHOT / REPLAY
    assert SNAPSHOT / buffer == L


@pytest.mark.parametrize(("layer", "fold", "replay"), [(KDA, 28.8, 15.2), (GDN, 51.4, 19.8), (MAMBA2, 72.8, 22.3)])
def test_section_9_12_at_the_sizes_of_real_layers(layer: str, fold: float, replay: float) -> None:
    """The document: 1000 times less resident, 32 times less at the peak, for any layer.

    At 32 layers, states in float32 and conv inputs in bfloat16: 29 to 73 times less with `fold`, which keeps no states
    of nodes at all, and 15 to 22 times less with `replay`, at the peak as well as resident.
    """
    snapshot = bytes_of(layer, "snapshot")
    assert snapshot / bytes_of(layer, "fold") == pytest.approx(fold, abs=0.05)
    assert snapshot / bytes_of(layer, "replay") == pytest.approx(replay, abs=0.05)


def test_section_9_3_what_a_replay_needs() -> None:
    """The document: hidden states, dt, B and C, about 10K elements per token and layer, 50 times less than a state.

    C (the query) is not needed, since no output is read. The conv inputs are, and the document leaves them out. At
    these sizes a token's records have 14K to 25K elements, 21 to 54 times fewer than a state.
    """
    names = {KDA: {"k", "v", "log_a", "beta"}, GDN: {"k", "v", "log_a", "beta"}, MAMBA2: {"x", "dt", "b"}}
    elements = {}
    for layer in LAYERS:
        of_node = record_plan(layer, "replay", num_nodes=1, num_layers=1).layers[0]
        assert set(of_node) == {NODE_STATES, "conv_inputs", *names[layer]}
        counts = {name: spec.num_bytes // spec.dtype.itemsize for name, spec in of_node.items()}
        state = counts.pop(NODE_STATES)
        elements[layer] = sum(counts.values()), round(state / sum(counts.values()), 1)
    assert elements == {KDA: (24_608, 21.3), GDN: (14_400, 36.4), MAMBA2: (19_584, 53.5)}


def test_section_9_8_the_time_of_a_replay() -> None:
    """The document: 32 layers x 4 tokens x 10 us is 100 to 300 us, about 2 % of a verify of 5 to 20 ms.

    It is 1,280 us, 6 to 26 %; 320 us, 2 to 6 %, with one launch per layer. The bytes alone, each state of 32 requests
    read and written once, are 2.05 GB, 476 us at 4.3 TB/s.
    """
    launch = 10 * US
    assert pytest.approx(1280 * US) == L * NUM_ACCEPTED * launch
    assert [round(100 * L * NUM_ACCEPTED * launch / verify) for verify in (20e-3, 5e-3)] == [6, 26]
    assert pytest.approx(320 * US) == L * launch
    assert [round(100 * L * launch / verify) for verify in (20e-3, 5e-3)] == [2, 6]
    moved = 2 * document_plan(1, node_states=STATE).num_bytes
    assert moved == pytest.approx(2.048 * GB)
    assert moved / 4.3e12 == pytest.approx(476 * US, rel=1e-3)


def test_section_9_12_a_scatter_is_not_free() -> None:
    """The document: the present scheme's commit costs nothing, O(1); replay adds 100 to 300 us.

    The scatter reads a state and writes one for each layer and request, as many bytes as a replay that reads each
    state once. Of a round's states the commit is the small part: what a state per node costs is moved by the verify.
    """
    assert states_moved("snapshot", T) == states_moved("replay", T) == 66
    assert states_moved("fold", T) == 3
    commit = 2
    assert [round(commit / states_moved("replay", num_nodes), 2) for num_nodes in (4, 16, 63)] == [0.29, 0.11, 0.03]


def test_section_9_13_savings_at_small_trees() -> None:
    """The document: at T = 3 the deferred scheme gains little, at T = 7 about 90 % of the buffer, at 63 most.

    The share that is saved is the same for every T, since all that is held grows with it: 93 to 96 % with `replay`, 97
    to 99 % with `fold`. What T changes is what this is a share of: 8.7 GB or 137 GB for KDA.
    """
    for layer in LAYERS:
        saved = {
            rollback: [1 - bytes_of(layer, rollback, T) / bytes_of(layer, "snapshot", T) for T in (4, 7, 63)]
            for rollback in ("replay", "fold")
        }
        assert all(share == pytest.approx(shares[0]) for shares in saved.values() for share in shares)
        assert 0.93 < saved["replay"][0] < 0.96 < saved["fold"][0] < 0.99
    assert bytes_of(KDA, "snapshot", 4) == pytest.approx(8.69 * GB, rel=1e-3)
    assert bytes_of(KDA, "snapshot", 63) == pytest.approx(136.88 * GB, rel=1e-3)


def test_section_9_13_room_for_more_requests() -> None:
    """The document: what is saved makes room for more requests. At 16 nodes for 480 to 500 states, so it does."""
    for layer in LAYERS:
        saved = bytes_of(layer, "snapshot", 16) - bytes_of(layer, "fold", 16)
        assert 480 < saved / state_bytes(layer, num_layers=L) < 501

"""Verify and commit compile to one graph for every number of rows, and then give what they give eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_runtime.ops import kda_tree
from hybrid_runtime.ops.conv_tree import conv_fold, conv_tree
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, draft_tree
from hybrid_runtime.ops.tree_attention import tree_attention, tree_mla
from tests.ops.recurrent_trees import OPS, DeltaRule, Mamba2, Nodes, make_case
from tests.ops.tree_cases import large_parents

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.repeat_interleave}
NUM_NODES, NUM_SLOTS = 3, 8

assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # fused float32 code rounds less or elsewhere


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kda_tree, "NODE_BLOCK", 2)


class Round(NamedTuple):
    """The last row is padding; that before it has fewer nodes than the others; destinations are slots or none."""

    parents_BT: Tensor
    path: AcceptedPath
    slots_B: Tensor
    destinations_B: Tensor

    def accept(self) -> tuple[DraftTree, AcceptedPath]:
        return draft_tree(self.parents_BT), self.path


def make_round(num_rows: int) -> Round:
    last_B = torch.randint(0, NUM_NODES, (num_rows,))
    slots_B = torch.tensor([*range(1, num_rows), 0])
    parents_BT = torch.tensor(large_parents("random", num_rows, NUM_NODES))
    path = path_to(parents_BT, torch.cat([last_B[:-2], torch.tensor([1, -1])]))
    return Round(parents_BT, path, slots_B, slots_B - slots_B % 2)


def path_to(parents_BT: Tensor, last_B: Tensor) -> AcceptedPath:
    """From the root to a node of each tree; -1: nothing is accepted."""
    nodes_BT, num_nodes_B = torch.zeros_like(parents_BT), torch.zeros_like(last_B)
    for row, node in enumerate(last_B.tolist()):
        nodes = [node] if node >= 0 else []
        while nodes and nodes[0] > 0:
            nodes.insert(0, int(parents_BT[row, nodes[0]]))
        nodes_BT[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
        num_nodes_B[row] = len(nodes)
    return AcceptedPath(nodes_BT, num_nodes_B)


def recurrent_round(op: Mamba2 | DeltaRule, now: Round, of_rows: Nodes, others: Nodes) -> tuple[Tensor | None, ...]:
    *nodes, node_states = of_rows
    *shared, pool = others
    tree, path = now.accept()
    y_BT, u_BT = op.verify(tuple(nodes), tuple(shared), pool, now.slots_B, tree)
    walked_y_BT = op.tree_states(tuple(nodes), tuple(shared), pool, now.slots_B, tree, node_states)
    op.fold(tuple(nodes), tuple(shared), pool, now.slots_B, now.destinations_B, u_BT, path)
    return y_BT, u_BT, walked_y_BT, *path


def convolution_round(now: Round, of_rows: Nodes, others: Nodes) -> tuple[Tensor | None, ...]:
    (x_BTD,), (weight_DW, bias_D, window_pool) = of_rows, others
    tree, path = now.accept()
    y_BTD = conv_tree(x_BTD, weight_DW, bias_D, window_pool, now.slots_B, tree)
    conv_fold(window_pool, now.slots_B, now.destinations_B, x_BTD, path)
    return y_BTD, *path


def attention_round(now: Round, of_rows: Nodes, others: Nodes) -> tuple[Tensor | None, ...]:
    (q_BTHD,), (k_pool, v_pool, w_HDR, table) = of_rows, others
    node_T = torch.arange(NUM_NODES)
    kv_slots_BT = torch.where(now.slots_B[:, None] == 0, 0, (now.slots_B[:, None] + 1) * NUM_NODES + node_T)
    tree = draft_tree(now.parents_BT)
    view = (table, now.slots_B, now.slots_B + 1, NUM_SLOTS, kv_slots_BT, tree)
    o_BTHV = tree_attention(q_BTHD, k_pool, v_pool, *view, scale=0.3, window=3)
    return o_BTHV, tree_mla(q_BTHD, q_BTHD[..., :2], k_pool[:, 0, :5], w_HDR, w_HDR, *view, scale=0.3)


def operands_of(case: Mamba2 | DeltaRule | str, num_rows: int) -> tuple[Nodes, Nodes]:
    """What a round takes that has the axis of rows, and what has not."""
    if case == "convolution":
        return (torch.randn(num_rows, NUM_NODES, 5),), (
            torch.randn(5, 4),
            torch.randn(5),
            torch.randn(NUM_SLOTS, 3, 5),
        )
    if case == "attention":
        table = torch.randint(1, NUM_NODES, (NUM_SLOTS, NUM_SLOTS), dtype=torch.int32)
        pools = torch.randn(2, (NUM_SLOTS + 1) * NUM_NODES, 2, 6)
        return (torch.randn(num_rows, NUM_NODES, 4, 6),), (
            pools[0].clone(),
            pools[1].clone(),
            torch.randn(4, 6, 3),
            table,
        )
    assert not isinstance(case, str)
    made = make_case(case, large_parents("random", num_rows, NUM_NODES)).to(torch.float32, torch.float32)
    pool = torch.randn(NUM_SLOTS, *made.pool.shape[1:])
    return (*made.nodes, torch.zeros(num_rows, NUM_NODES, *pool.shape[1:])), (*made.shared, pool)


def round_of(case: Mamba2 | DeltaRule | str) -> Callable[..., tuple[Tensor | None, ...]]:
    if isinstance(case, str):
        return {"convolution": convolution_round, "attention": attention_round}[case]
    return partial(recurrent_round, case)


class RefuseWaits(TorchDispatchMode):
    """Refuses what would make the host wait for the device: values, or shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), f"{func} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [*OPS, "convolution", "attention"], ids=str)
def test_the_host_waits_for_no_value(case: Mamba2 | DeltaRule | str):
    now, (of_rows, others) = make_round(4), operands_of(case, 4)
    with RefuseWaits():
        round_of(case)(now, of_rows, others)


@pytest.mark.parametrize("case", [*OPS, "convolution", "attention"], ids=str)
def test_one_graph_serves_every_number_of_rows(case: Mamba2 | DeltaRule | str):
    """As traced and functionalised, without code generation, which takes most of a compilation's time."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(round_of(case), fullgraph=True, backend=counter)
    for num_rows in (4, 7):
        now, (of_rows, others) = make_round(num_rows), operands_of(case, num_rows)
        for tensor in tree_leaves((now, of_rows)):
            torch._dynamo.mark_dynamic(tensor, 0)
        expected_others, expected_of_rows = copy.deepcopy(others), copy.deepcopy(of_rows)
        expected = round_of(case)(now, expected_of_rows, expected_others)
        assert_close(compiled(now, of_rows, others), expected)
        assert_close((of_rows, others), (expected_of_rows, expected_others))  # pools too
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", ["convolution"])
def test_generated_code_gives_the_same(case: Mamba2 | DeltaRule | str):
    now, (of_rows, others) = make_round(4), operands_of(case, 4)
    expected_others, expected_of_rows = copy.deepcopy(others), copy.deepcopy(of_rows)
    expected = round_of(case)(now, expected_of_rows, expected_others)
    assert_close(torch.compile(round_of(case), fullgraph=True)(now, of_rows, others), expected)
    assert_close((of_rows, others), (expected_of_rows, expected_others))

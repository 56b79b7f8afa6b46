"""The kernels over draft trees inside a compiled graph: whole, in place, for any number of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from hybrid_runtime.ops.cpu_kernels import tree_twins
from hybrid_runtime.ops.draft_tree import AcceptedPath, draft_tree
from tests.ops.cpu_kernels.tree_updates import F32, OPS, TWINS
from tests.ops.recurrent_trees import DeltaRule, Mamba2, Nodes, make_case
from tests.ops.tree_cases import large_parents, path_to_ends, same_bits

NUM_NODES, NUM_SLOTS = 5, 9
Round = Callable[[Nodes, Nodes, Tensor], tuple[Tensor | None, ...]]


def recurrent_round(op: Mamba2 | DeltaRule, of_rows: Nodes, shared: Nodes, pool: Tensor) -> tuple[Tensor | None, ...]:
    *nodes, node_states, slots_B, parents_BT, nodes_BT, num_nodes_B = of_rows
    tree = draft_tree(parents_BT)
    y_BT, u_BT = TWINS[op].verify(tuple(nodes), shared, pool, slots_B, tree)
    walked_y_BT = TWINS[op].tree_states(tuple(nodes), shared, pool, slots_B, tree, node_states)
    path = AcceptedPath(nodes_BT, num_nodes_B)
    TWINS[op].fold(tuple(nodes), shared, pool, slots_B, slots_B, u_BT, path)
    return y_BT, u_BT, walked_y_BT


def recurrent_operands(op: Mamba2 | DeltaRule, num_rows: int) -> tuple[Nodes, Nodes, Tensor]:
    """What has the axis of rows, what has not, and the pool; the last row commits nothing."""
    case = make_case(op, large_parents("random", num_rows, NUM_NODES)).to(F32, F32)
    pool = torch.randn(NUM_SLOTS, *case.pool.shape[1:])
    path = path_to_ends(case.parents, [*[3] * (num_rows - 1), None])
    node_states = torch.zeros(num_rows, NUM_NODES, *pool.shape[1:])
    return (*case.nodes, node_states, torch.arange(num_rows), case.tree.parents_BT, *path), case.shared, pool


def other_round(of_rows: Nodes, shared: Nodes, window_pool: Tensor) -> tuple[Tensor | None, ...]:
    """The convolution and attention."""
    x_BTD, q_BTHD, kv_slots_BT, slots_B, parents_BT, *path = of_rows
    weight_DW, k_pool, v_pool, w_HDR, table = shared
    tree = draft_tree(parents_BT)
    y_BTD = tree_twins.conv_tree(x_BTD, weight_DW, None, window_pool, slots_B, tree)
    tree_twins.conv_fold(window_pool, slots_B, slots_B, x_BTD, AcceptedPath(*path))
    view = (table, slots_B, slots_B + 1, NUM_SLOTS, kv_slots_BT, tree)
    o_BTHV = tree_twins.tree_attention(q_BTHD, k_pool, v_pool, *view, scale=0.3, window=3)
    latents = tree_twins.tree_mla(q_BTHD, q_BTHD[..., :2], k_pool[:, 0, :5], w_HDR, w_HDR, *view, scale=0.3)
    return y_BTD, o_BTHV, latents


def other_operands(num_rows: int) -> tuple[Nodes, Nodes, Tensor]:
    parents = large_parents("random", num_rows, NUM_NODES)
    path = path_to_ends(parents, [*[3] * (num_rows - 1), None])
    num_kv_slots = NUM_SLOTS * (NUM_NODES + 1)
    of_rows = (
        torch.randn(num_rows, NUM_NODES, 7),
        torch.randn(num_rows, NUM_NODES, 4, 6),
        torch.randint(1, num_kv_slots, (num_rows, NUM_NODES)),
        torch.arange(num_rows),
        torch.tensor(parents),
        *path,
    )
    pools = torch.randn(num_kv_slots, 2, 6), torch.randn(num_kv_slots, 2, 5)
    table = torch.randint(1, num_kv_slots, (NUM_SLOTS, NUM_SLOTS), dtype=torch.int32)
    return of_rows, (torch.randn(7, 4), *pools, torch.randn(4, 6, 3), table), torch.randn(NUM_SLOTS, 3, 7)


def round_of(case: Mamba2 | DeltaRule | str) -> tuple[Round, Callable[[int], tuple[Nodes, Nodes, Tensor]]]:
    """A round and what makes its operands for a number of rows."""
    if isinstance(case, str):
        return other_round, other_operands
    return partial(recurrent_round, case), partial(recurrent_operands, case)


@pytest.mark.parametrize("case", [*OPS, "convolution and attention"], ids=str)
def test_one_graph_serves_every_number_of_rows_and_writes_its_pool_in_place(case) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run, operands = round_of(case)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for num_rows in (4, 2, 7):
        of_rows, shared, pool = operands(num_rows)
        for tensor in of_rows:
            torch._dynamo.mark_dynamic(tensor, 0)
        expected_of_rows, expected_pool = copy.deepcopy(of_rows), pool.clone()
        expected = run(expected_of_rows, shared, expected_pool)
        for actual, wanted in zip(tree_leaves(compiled(of_rows, shared, pool)), tree_leaves(expected), strict=True):
            assert actual is wanted is None or same_bits(actual, wanted)
        for actual, wanted in zip((pool, *of_rows), (expected_pool, *expected_of_rows), strict=True):
            assert same_bits(actual, wanted)  # pool and node states are written in place
    assert counter.frame_count == 1


def test_the_schemas_and_shapes_are_those_of_the_kernels() -> None:
    ops = torch.ops.hybrid_runtime_cpu
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for op in OPS:
        of_rows, shared, pool = recurrent_operands(op, 3)
        *nodes, node_states, slots_B, parents_BT, nodes_BT, num_nodes_B = of_rows
        committed = (pool, slots_B, slots_B)
        if isinstance(op, Mamba2):
            x, dt, b, c = nodes
            verify = (x, dt, *shared, b, c, pool, slots_B, parents_BT)
            calls.append((ops.mamba2_tree, verify))
            calls.append((ops.mamba2_tree_states, (*verify, node_states)))
            calls.append((ops.mamba2_fold, (*committed, dt, *shared, x, b, nodes_BT, num_nodes_B)))
            continue
        q, k, v, log_a, beta = nodes
        log_a = log_a.reshape(*beta.shape, -1)
        verify = (q, k, v.bfloat16(), log_a, beta, pool, slots_B, parents_BT)
        calls.append((ops.delta_tree, verify))
        calls.append((ops.delta_tree_states, (*verify, node_states)))
        calls.append((ops.delta_fold, (*committed, k, v, log_a, nodes_BT, num_nodes_B)))
    of_rows, shared, window_pool = other_operands(3)
    x_BTD, q_BTHD, kv_slots_BT, slots_B, parents_BT, *path = of_rows
    weight_DW, k_pool, v_pool, _, table = shared
    calls += [
        (ops.conv_tree, (x_BTD, weight_DW, None, window_pool, slots_B, parents_BT)),
        (ops.conv_fold, (window_pool, slots_B, slots_B, x_BTD, *path)),
        (ops.tree_attention, (q_BTHD, k_pool, v_pool, table, slots_B, slots_B, kv_slots_BT, parents_BT, 0.5, 3)),
    ]
    for overloads, arguments in calls:
        torch.library.opcheck(overloads.default, arguments, test_utils=("test_schema", "test_faketensor"))

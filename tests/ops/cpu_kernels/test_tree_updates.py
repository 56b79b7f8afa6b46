"""Recurrent states over draft trees: the kernels against the float64 recurrence along every path.

Shapes: as in `tree_updates.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops.draft_tree import AcceptedPath
from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned
from tests.ops.cpu_kernels.tree_updates import (
    BF16,
    F32,
    F64,
    NUM_ROWS,
    OPS,
    PADDING_ROW,
    case_of,
    fold_into,
    in_kernel,
    live,
    magnitudes,
)
from tests.ops.recurrent_trees import GDN, KDA, MAMBA2, Dims, TreeCase
from tests.ops.tree_cases import LARGE_SHAPES, path_to_ends, same_bits

every_op = pytest.mark.parametrize("op", OPS, ids=repr)
SMALL = Dims(groups=2, copies=2, key=24, value=20)
LARGE = Dims(groups=1, copies=2, key=128, value=64)


def ends_of(case: TreeCase) -> list[int]:
    """Some node of each row, the last in the first row."""
    num_nodes = case.tree.parents_BT.shape[1]
    return [num_nodes - 1, num_nodes // 3, num_nodes // 2]


def check(case: TreeCase, tokens: torch.dtype, pool: torch.dtype) -> None:
    """Outputs, u, and the states behind one path of each row, of which only those may change."""
    plain = case.to(tokens, F32)
    plain = replace(plain, pool=plain.pool.to(pool))
    twin, exact = in_kernel(plain), plain.to(F64, F64)
    y_BT, states_BT = exact.expected()
    _, u_BT = exact.verify()
    y_size, u_size, state_size = magnitudes(exact)
    (plain_y, plain_u), (twin_y, twin_u) = plain.verify(), twin.verify()
    assert same_bits(twin.pool, plain.pool)
    assert_within_budget(live(twin_y), live(plain_y), live(y_BT), live(y_size))
    assert not twin_y[PADDING_ROW].any()
    if u_BT is not None and plain_u is not None and twin_u is not None:
        assert_within_budget(live(twin_u), live(plain_u), live(u_BT), live(u_size))
        assert not twin_u[PADDING_ROW].any()
    ends = ends_of(case)
    path = path_to_ends(case.parents, ends)
    free = next(slot for slot in range(1, len(case.pool)) if slot not in case.slots_B)
    destinations_B = case.slots_B.clone()
    destinations_B[0] = free
    plain_pool, twin_pool = (fold_into(of, u, destinations_B, path) for of, u in ((plain, plain_u), (twin, twin_u)))
    wanted = [states[torch.arange(NUM_ROWS), torch.tensor(ends)] for states in (states_BT, state_size)]
    folded = [live(pool[destinations_B]) for pool in (twin_pool, plain_pool)]
    assert_within_budget(folded[0], folded[1], *(live(states) for states in wanted))
    others = [slot for slot in range(len(case.pool)) if slot not in live(destinations_B)]
    assert same_bits(twin_pool[others], plain.pool[others])


@every_op
@pytest.mark.parametrize("shape", LARGE_SHAPES)
@pytest.mark.parametrize(
    ("num_nodes", "tokens", "pool"),
    [
        (1, F32, F32),
        (2, BF16, F32),
        (7, F32, F32),
        (7, BF16, BF16),
        (63, BF16, F32),
        (63, BF16, BF16),
        (64, F32, F32),
    ],
)
def test_outputs_and_folds_keep_the_budget_and_touch_nothing_else(op, shape, num_nodes, tokens, pool) -> None:
    check(case_of(op, shape, num_nodes, SMALL), tokens, pool)


@every_op
@pytest.mark.parametrize(("shape", "decay"), [("full", 0.1), ("random", 5.0), ("chain", 1e4)])
def test_sizes_of_models_keep_the_budget(op, shape: str, decay: float) -> None:
    check(case_of(op, shape, 63, LARGE, decay), BF16, F32)


@every_op
@pytest.mark.parametrize("dims", [Dims(1, 1, 1, 1), Dims(1, 3, 65, 33), Dims(3, 1, 8, 100)])
def test_odd_sizes(op, dims: Dims) -> None:
    check(case_of(op, "random", 9, dims), F32, F32)


def committed(case: TreeCase, u_BT: Tensor | None) -> Tensor:
    return fold_into(case, u_BT, case.slots_B, path_to_ends(case.parents, ends_of(case)))


@every_op
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_of_a_node_reaches_its_descendants_only(op, fault: float) -> None:
    for index in range(len(case_of(op, "random", 1, SMALL).nodes)):
        case = in_kernel(case_of(op, "random", 12, SMALL).to(F32, F32))
        clean = case.verify()
        node = 3
        case.nodes[index][0, node] = fault
        reached_BT = torch.zeros_like(case.tree.parents_BT, dtype=torch.bool)
        reached_BT[0] = case.tree.ancestors_BTT[0, :, node]
        for result_BT, clean_BT in zip(case.verify(), clean, strict=True):
            if result_BT is not None and clean_BT is not None:
                assert same_bits(result_BT[~reached_BT], clean_BT[~reached_BT])
        if index == op.read_by_the_node_alone:
            reached_BT[0] = torch.arange(12) == node
        assert not case.verify()[0][reached_BT].isfinite().any()


@every_op
def test_a_fold_reads_nothing_of_rejected_nodes(op) -> None:
    case = in_kernel(case_of(op, "random", 12, SMALL).to(F32, F32))
    _, u_BT = case.verify()
    expected = committed(case, u_BT)
    path = path_to_ends(case.parents, ends_of(case))
    for row in range(NUM_ROWS):
        accepted = path.nodes_BT[row, : path.num_nodes_B[row]]
        rejected = [node for node in range(12) if node not in accepted]
        for tensor in (*case.nodes, u_BT):
            if tensor is not None:
                tensor[row, rejected] = math.nan
    assert same_bits(committed(case, u_BT), expected)


@every_op
def test_rows_that_commit_nothing_change_nothing(op) -> None:
    """Neither without accepted nodes nor with destination 0, also where other rows use those slots."""
    case = in_kernel(case_of(op, "random", 5, SMALL).to(F32, F32))
    _, u_BT = case.verify()
    path = path_to_ends(case.parents, [None, 2, 4])
    assert same_bits(fold_into(case, u_BT, torch.tensor([int(case.slots_B[2]), 0, 0]), path), case.pool)


@every_op
def test_strides_do_not_matter(op) -> None:
    case = in_kernel(case_of(op, "random", 7, SMALL).to(F32, F32))
    y_BT, u_BT = case.verify()
    apart = torch.full((len(case.pool), 2, *case.pool.shape[1:]), math.nan)  # slots further apart than a state is long
    apart[:, 1] = case.pool
    tree = case.tree._replace(parents_BT=case.tree.parents_BT.mT.contiguous().mT)
    slots_B = torch.stack([case.slots_B, case.slots_B + 100], dim=1)[:, 0]
    nodes, shared = (tuple(poisoned(x) for x in operands) for operands in (case.nodes, case.shared))
    strided = replace(case, nodes=nodes, shared=shared, pool=apart[:, 1], slots_B=slots_B, tree=tree)
    strided_y_BT, strided_u_BT = strided.verify()
    assert same_bits(strided_y_BT, y_BT)
    if u_BT is not None and strided_u_BT is not None:
        assert same_bits(strided_u_BT, u_BT)
        strided_u_BT = poisoned(strided_u_BT)
    nodes_BT, num_nodes_B = path_to_ends(case.parents, ends_of(case))
    strided_path = AcceptedPath(nodes_BT.mT.contiguous().mT, torch.stack([num_nodes_B, num_nodes_B + 1], dim=1)[:, 0])
    strided.fold(strided_u_BT, slots_B, strided_path)
    assert same_bits(apart[:, 1], committed(case, u_BT))
    assert apart[:, 0].isnan().all()


@every_op
def test_threads_do_not_change_a_bit(op, use_threads) -> None:
    case = in_kernel(case_of(op, "random", 63, LARGE).to(BF16, F32))
    results = []
    for threads in (1, 2):
        use_threads(threads)
        y_BT, u_BT = case.verify()
        results.append((y_BT, committed(case, u_BT)))
    for one, two in zip(*results, strict=True):
        assert same_bits(one, two)


@every_op
def test_no_rows_are_no_work(op) -> None:
    case = in_kernel(case_of(op, "random", 5, SMALL).to(F32, F32))
    tree = type(case.tree)(*(x[:0] for x in case.tree))
    none = replace(case, nodes=tuple(x[:0] for x in case.nodes), slots_B=case.slots_B[:0], tree=tree)
    y_BT, u_BT = none.verify()
    assert y_BT.shape == (0, 5, *case.verify()[0].shape[2:])
    path = AcceptedPath(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert same_bits(fold_into(none, u_BT, none.slots_B, path), case.pool)


@pytest.mark.parametrize("op", [MAMBA2, GDN, KDA], ids=repr)
def test_float64_runs_the_pytorch_form(op) -> None:
    case = case_of(op, "random", 5, SMALL)
    (y_BT, u_BT), (twin_y_BT, twin_u_BT) = case.verify(), in_kernel(case).verify()
    assert same_bits(twin_y_BT, y_BT)
    assert same_bits(committed(in_kernel(case), twin_u_BT), committed(case, u_BT))

"""The state behind every node of a draft tree, written to a buffer: against the float64 recurrence along every path.

Shapes: as in `tree_updates.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned
from tests.ops.cpu_kernels.tree_updates import (
    BF16,
    F32,
    F64,
    NUM_ROWS,
    OPS,
    PADDING_ROW,
    case_of,
    in_kernel,
    live,
    magnitudes,
)
from tests.ops.recurrent_trees import Dims, TreeCase
from tests.ops.tree_cases import LARGE_SHAPES, same_bits

every_op = pytest.mark.parametrize("op", OPS, ids=repr)
SMALL = Dims(groups=2, copies=2, key=32, value=20)


def check(case: TreeCase, tokens: torch.dtype, pool: torch.dtype) -> None:
    """Outputs and states; of the buffer nothing else is written, of the pool nothing."""
    plain = case.to(tokens, F32)
    plain = replace(plain, pool=plain.pool.to(pool))
    twin, exact = in_kernel(plain), plain.to(F64, F64)
    before = plain.pool.clone()
    (twin_y, twin_states), (plain_y, plain_states) = twin.walk(pool), plain.walk(pool)
    (y_BT, states_BT), (y_size, _, state_size) = exact.expected(), magnitudes(exact)
    assert same_bits(twin.pool, before)
    assert_within_budget(live(twin_y), live(plain_y), live(y_BT), live(y_size))
    assert_within_budget(live(twin_states), live(plain_states), live(states_BT), live(state_size))
    assert not twin_y[PADDING_ROW].any()
    assert twin_states[PADDING_ROW].isnan().all()


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
def test_states_keep_the_budget_and_nothing_else_is_written(op, shape, num_nodes, tokens, pool) -> None:
    check(case_of(op, shape, num_nodes, SMALL), tokens, pool)


@every_op
@pytest.mark.parametrize("dims", [Dims(1, 1, 1, 1), Dims(1, 3, 65, 33), Dims(3, 1, 8, 100), Dims(1, 2, 128, 64)])
def test_other_sizes(op, dims: Dims) -> None:
    check(case_of(op, "random", 9, dims, decay=5.0), F32, F32)


@every_op
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_of_a_node_reaches_its_descendants_only(op, fault: float) -> None:
    for index in range(len(case_of(op, "random", 1, SMALL).nodes)):
        case = in_kernel(case_of(op, "random", 12, SMALL).to(F32, F32))
        clean = case.walk(F32)
        case.nodes[index][0, 3] = fault
        reached_BT = torch.zeros_like(case.tree.parents_BT, dtype=torch.bool)
        reached_BT[0] = case.tree.ancestors_BTT[0, :, 3]
        faulty = case.walk(F32)
        for result_BT, clean_BT in zip(faulty, clean, strict=True):
            assert same_bits(result_BT[~reached_BT], clean_BT[~reached_BT])
        if index == op.read_by_the_node_alone:
            assert same_bits(faulty[1], clean[1])
            reached_BT[0] = torch.arange(12) == 3
        assert not faulty[0][reached_BT].isfinite().any()


@every_op
@pytest.mark.parametrize("dims", [SMALL, Dims(2, 2, 20, 8)])
def test_strides_do_not_matter(op, dims: Dims) -> None:
    """Also where states don't begin on cache lines."""
    case = in_kernel(case_of(op, "random", 7, dims).to(F32, F32))
    y_BT, states_BT = case.walk(F32)
    nodes = tuple(poisoned(x) for x in case.nodes)
    flat = torch.full((NUM_ROWS, 7, 2, states_BT[0, 0].numel() + 1), math.nan)
    buffer = flat[:, :, 1, 1:].unflatten(2, states_BT.shape[2:])
    strided_y_BT = case.op.tree_states(nodes, case.shared, case.pool, case.slots_B, case.tree, buffer)
    assert same_bits(strided_y_BT, y_BT)
    assert same_bits(buffer, states_BT)
    assert flat[:, :, 0].isnan().all()
    assert flat[:, :, 1, 0].isnan().all()


@every_op
def test_threads_do_not_change_a_bit(op, use_threads) -> None:
    case = in_kernel(case_of(op, "random", 15, SMALL).to(BF16, F32))
    results = []
    for threads in (1, 2):
        use_threads(threads)
        results.append(case.walk(F32))
    for one, two in zip(*results, strict=True):
        assert same_bits(one, two)


@every_op
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda states: states[0], "of 5 axes"),
        (lambda states: states[:, :-1], "must have size 5 or more on axis 1, not 4"),
        (lambda states: states.mT.contiguous().mT, "node_states must be contiguous behind its first 3 axes"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(op, change, complaint: str) -> None:
    case = in_kernel(case_of(op, "random", 5, SMALL).to(F32, F32))
    buffer = change(case.walk(F32)[1])
    with pytest.raises(ValueError, match=complaint):
        case.op.tree_states(case.nodes, case.shared, case.pool, case.slots_B, case.tree, buffer)


@every_op
def test_other_dtypes_run_the_pytorch_form(op) -> None:
    wide, narrow = case_of(op, "random", 5, SMALL), case_of(op, "random", 5, SMALL).to(BF16, F32)
    for case, buffer_dtype in ((wide, F64), (narrow, BF16)):
        for actual, expected in zip(in_kernel(case).walk(buffer_dtype), case.walk(buffer_dtype), strict=True):
            assert same_bits(actual, expected)

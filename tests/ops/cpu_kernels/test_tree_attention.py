"""Attention over draft trees in the kernels: the float64 definition along every path, NaN in what must not be read.

Shapes: as in `tests/ops/test_tree_attention.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops import tree_attention as plain
from hybrid_runtime.ops.cpu_kernels import tree_twins
from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned
from tests.ops.test_tree_attention import SCALE, Batch, make_batch
from tests.ops.tree_cases import LARGE_SHAPES, large_parents, same_bits

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
Operands = tuple[Tensor, Tensor, Tensor]


def operands(batch: Batch, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> Operands:
    """Queries and pools of keys and values."""
    (num_heads, num_groups), (key_dim, value_dim) = heads, dims
    pools = (batch.pool(num_groups, key_dim, dtype=dtype), batch.pool(num_groups, value_dim, dtype=dtype))
    return batch.normal(*batch.kv_slots_BT.shape, num_heads, key_dim, dtype=dtype), *pools


def attend(form, batch: Batch, parts: tuple[Tensor, ...]) -> Tensor:
    window = {} if batch.window is None else {"window": batch.window}
    return form(*parts, *batch.arguments(), scale=SCALE, **window)


def check(batch: Batch, parts: Operands) -> None:
    """Weights are positive and sum to one: what the terms of a result add up to is at most the largest value."""
    doubles = tuple(part.double() for part in parts)
    exact = attend(plain.tree_attention, batch, doubles)
    largest = doubles[2].nan_to_num(0).abs().max().expand_as(exact)
    assert_within_budget(
        attend(tree_twins.tree_attention, batch, parts), attend(plain.tree_attention, batch, parts), exact, largest
    )


@pytest.mark.parametrize("shape", LARGE_SHAPES)
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 63, 64])
@pytest.mark.parametrize("window", [None, 5, 90])
def test_nodes_see_their_context_and_ancestors(shape: str, num_nodes: int, window: int | None) -> None:
    """Rows of a long, a short and no context; the last is padding."""
    batch = make_batch(large_parents(shape, 3, num_nodes), [200, 9, 0], window)
    for dtype in (F32, BF16):
        check(batch, operands(batch, (4, 2), (24, 20), dtype))


@pytest.mark.parametrize("heads", [(1, 1), (12, 4), (32, 1)])
@pytest.mark.parametrize("dims", [(1, 1), (8, 5), (64, 64), (80, 33)])
def test_heads_and_sizes(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    batch = make_batch(large_parents("random", 2, 13), [64, 65])
    check(batch, operands(batch, heads, dims, F32))


def test_more_nodes_than_are_worked_on_together() -> None:
    batch = make_batch(large_parents("random", 1, 130), [3])
    check(batch, operands(batch, (2, 1), (16, 16), F32))


@pytest.mark.parametrize("pools", [F32, BF16])
def test_queries_and_pools_may_differ(pools: torch.dtype) -> None:
    batch = make_batch(large_parents("random", 2, 9), [20, 30])
    q_BTHD, k_pool, v_pool = operands(batch, (4, 2), (16, 16), pools)
    check(batch, (q_BTHD.to(F32 if pools == BF16 else BF16), k_pool, v_pool))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_latent_attention(dtype: torch.dtype) -> None:
    batch = make_batch(large_parents("random", 2, 13), [70, 9])
    num_heads = 6
    latent_pool = batch.pool(36, dtype=dtype)
    weights = (batch.normal(num_heads, 16, 32, dtype=dtype), batch.normal(num_heads, 12, 32, dtype=dtype))
    q_BTHD = batch.normal(*batch.kv_slots_BT.shape, num_heads, 20, dtype=dtype) / 4
    parts = (*q_BTHD.split([16, 4], dim=-1), latent_pool, *weights)
    exact = attend(plain.tree_mla, batch, tuple(part.double() for part in parts))
    twin, expected = (attend(form, batch, parts) for form in (tree_twins.tree_mla, plain.tree_mla))
    assert_within_budget(twin, expected, exact, exact.abs().max().expand_as(exact))


@pytest.mark.parametrize("keys_too", [True, False])
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_in_the_slot_of_a_node_reaches_its_descendants_only(keys_too: bool, fault: float) -> None:
    batch = make_batch(large_parents("random", 2, 13), [70, 9])
    q_BTHD, k_pool, v_pool = operands(batch, (4, 2), (24, 20), F32)
    clean = attend(tree_twins.tree_attention, batch, (q_BTHD, k_pool, v_pool))
    slot = batch.kv_slots_BT[0, 2]
    v_pool[slot] = fault
    if keys_too:
        k_pool[slot] = math.nan
    faulty = attend(tree_twins.tree_attention, batch, (q_BTHD, k_pool, v_pool))
    reached_BT = torch.zeros_like(batch.kv_slots_BT, dtype=torch.bool)
    reached_BT[0] = batch.tree.ancestors_BTT[0, :, 2]
    assert clean.isfinite().all()
    assert same_bits(faulty[~reached_BT], clean[~reached_BT])
    assert faulty[reached_BT].isnan().all()


def test_a_fault_in_the_context_reaches_whom_the_window_lets_see_it() -> None:
    batch = make_batch(large_parents("chain", 1, 6), [20], window=4)
    parts = operands(batch, (4, 2), (24, 20), F32)
    parts[2][batch.table[batch.rows_B[0], 18].long()] = math.nan
    assert attend(tree_twins.tree_attention, batch, parts)[0].isnan().all(dim=-1).all(dim=-1).tolist() == [
        *[True] * 2,
        *[False] * 4,
    ]


def test_strides_do_not_matter() -> None:
    batch = make_batch(large_parents("random", 2, 9), [20, 30])
    q_BTHD, k_pool, v_pool = operands(batch, (4, 2), (16, 16), F32)
    expected = attend(tree_twins.tree_attention, batch, (q_BTHD, k_pool, v_pool))
    joined = torch.cat([k_pool, v_pool], dim=-1)
    parts = (poisoned(q_BTHD), joined[..., :16], joined[..., 16:])
    assert same_bits(attend(tree_twins.tree_attention, batch, parts), expected)


def test_threads_do_not_change_a_bit(use_threads) -> None:
    batch = make_batch(large_parents("random", 3, 63), [200, 9, 130])
    parts = operands(batch, (8, 2), (64, 64), BF16)
    results = []
    for threads in (1, 2):
        use_threads(threads)
        results.append(attend(tree_twins.tree_attention, batch, parts))
    assert same_bits(*results)


def test_float64_runs_the_pytorch_form() -> None:
    batch = make_batch(large_parents("random", 2, 9), [20, 30])
    parts = operands(batch, (4, 2), (16, 16), F64)
    exact = attend(plain.tree_attention, batch, parts)
    torch.testing.assert_close(attend(tree_twins.tree_attention, batch, parts), exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("index", "change", "complaint"),
    [
        (1, lambda k_pool: k_pool[..., :-1], "k_pool must have size 16 on axis 2"),
        (2, lambda v_pool: v_pool[:-1], "v_pool must have size"),
        (0, lambda q_BTHD: q_BTHD[:, :, :3], "k_pool has 2 groups for 3 heads"),
        (3, lambda table: table.long(), "req_to_token must be of dtype int32"),
        (3, lambda table: table + 1000, "req_to_token names slot .*, which the pool doesn't have"),
        (4, lambda rows_B: rows_B + 4, "which is no row of the table"),
        (5, lambda lens_B: lens_B + 100, "committed_lens_B.0. is 120, not in 0..33"),
        (5, lambda lens_B: -lens_B, "not in 0..33"),
        (7, lambda kv_slots_BT: kv_slots_BT + 1000, "kv_slots_BT.0, 0. is .*, which the pool doesn't have"),
        (7, lambda kv_slots_BT: kv_slots_BT[:, :-1], "kv_slots_BT must have size 9"),
        (8, lambda tree: tree._replace(parents_BT=tree.parents_BT[:, :-1]), "parents_BT has 8 nodes, not 9"),
        (8, lambda tree: tree._replace(parents_BT=tree.parents_BT + 1), "which is no node before it"),
    ],
)
def test_what_does_not_fit_is_refused(index: int, change, complaint: str) -> None:
    batch = make_batch(large_parents("random", 2, 9), [20, 30])
    arguments: list[Any] = [*operands(batch, (4, 2), (16, 16), F32), *batch.arguments()]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=complaint):
        tree_twins.tree_attention(*arguments, scale=SCALE)


def test_a_window_without_a_place_is_refused() -> None:
    batch = make_batch([[0, 0]], [3], window=0)
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        attend(tree_twins.tree_attention, batch, operands(batch, (1, 1), (8, 8), F32))

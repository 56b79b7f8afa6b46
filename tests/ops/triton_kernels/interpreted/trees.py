"""Attention of draft trees over pool slots against its twins, with NaN in every slot that must not be read.

Shapes: as in `ops/tree_attention.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops import tree_attention as plain
from hybrid_runtime.ops import triton_kernels
from hybrid_runtime.ops.triton_kernels.attention import MIN_SPLIT_TOKENS as SPLIT
from tests.ops.test_tree_attention import SCALE, Batch, make_batch
from tests.ops.tree_cases import same_bits
from tests.ops.triton_kernels.interpreted.budget import assert_within_budget

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TREES = [[0, 0, 1, 0, 2], [0, 0, 0, 0, 0], [0, 0, 1, 2, 3], [0, 0, 0, 1, 1]]
EDGES = [2 * SPLIT + 3, 1, SPLIT, 0]  # the last row is padding


def grouped(batch: Batch, num_heads: int, num_groups: int, dtype: torch.dtype) -> list[Tensor]:
    pools = [batch.pool(num_groups, size, dtype=dtype) for size in (24, 20)]
    return [batch.normal(*batch.kv_slots_BT.shape, num_heads, 24, dtype=dtype), *pools]


def latent(batch: Batch, num_heads: int, rope_dim: int, dtype: torch.dtype) -> list[Tensor]:
    nodes = batch.kv_slots_BT.shape
    return [
        batch.normal(*nodes, num_heads, 7, dtype=dtype),
        batch.normal(*nodes, num_heads, rope_dim, dtype=dtype),
        batch.pool(12 + rope_dim, dtype=dtype),
        batch.normal(num_heads, 7, 12, dtype=dtype) / 2,
        batch.normal(num_heads, 5, 12, dtype=dtype) / 2,
    ]


def check(name: str, batch: Batch, operands: list[Tensor], magnitude: float, **options: int) -> None:
    kernel, twin = getattr(triton_kernels, name), getattr(plain, name)
    o_BTHV = kernel(*operands, *batch.arguments(), scale=SCALE, **options)
    plain_BTHV = twin(*operands, *batch.arguments(), scale=SCALE, **options)
    exact_BTHV = twin(*(operand.double() for operand in operands), *batch.arguments(), scale=SCALE, **options)
    assert_within_budget(o_BTHV, plain_BTHV, exact_BTHV, magnitude)


def largest(tensor: Tensor) -> float:
    return tensor.double().abs().nan_to_num(0.0).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_groups"), [(6, 2), (1, 1), (9, 1)])  # 15, 5 and 45 queries of a program's
def test_it_is_its_twin(dtype: torch.dtype, num_heads: int, num_groups: int) -> None:
    batch = make_batch(TREES, EDGES)
    operands = grouped(batch, num_heads, num_groups, dtype)
    check("tree_attention", batch, operands, largest(operands[2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope_dim", [0, 6])
def test_the_latent_form_is_its_twin(dtype: torch.dtype, rope_dim: int) -> None:
    batch = make_batch(TREES, EDGES)
    operands = latent(batch, 3, rope_dim, dtype)
    # a head's values are sums of 12 latent channels with weights of about one half
    check("tree_mla", batch, operands, 12 * largest(operands[2]) * largest(operands[4]))


def test_nodes_see_their_window() -> None:
    batch = make_batch(TREES, EDGES, window=4)
    operands = grouped(batch, 4, 2, torch.float32)
    check("tree_attention", batch, operands, largest(operands[2]), window=4)


@pytest.mark.parametrize("name", ["tree_attention", "tree_mla"])
def test_a_fault_in_the_slots_of_a_node_reaches_its_descendants_only(name: str) -> None:
    batch = make_batch(TREES, EDGES)
    operands = grouped(batch, 4, 2, torch.float32) if name == "tree_attention" else latent(batch, 3, 6, torch.float32)
    pools = operands[1:3] if name == "tree_attention" else operands[2:3]
    clean = getattr(triton_kernels, name)(*operands, *batch.arguments(), scale=SCALE)
    for pool in pools:
        pool[batch.kv_slots_BT[0, 1]] = math.nan
    faulty = getattr(triton_kernels, name)(*operands, *batch.arguments(), scale=SCALE)
    reached_BT = torch.zeros_like(batch.kv_slots_BT, dtype=torch.bool)
    reached_BT[0] = batch.tree.ancestors_BTT[0, :, 1]
    assert reached_BT.sum() == 3
    assert clean.isfinite().all()
    assert same_bits(faulty[~reached_BT], clean[~reached_BT])
    assert faulty[reached_BT].isnan().all()

"""Attention of tree nodes against the plain definition along every path, with NaN in every slot that must not be read.

Shapes: as in `ops/tree_attention.py`; U slots of a pool, L flat tokens of all paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops.attention import attention_reference
from hybrid_runtime.ops.draft_tree import DraftTree
from hybrid_runtime.ops.tree_attention import tree_attention, tree_mla
from tests.ops.tree_cases import (
    LARGE_SHAPES,
    Parents,
    PathBatch,
    build_tree,
    large_parents,
    path_to,
    same_bits,
    small_parents,
)

SCALE = 0.4
HEADS = [(1, 1), (3, 1), (4, 2)]  # query heads, key-value heads


@dataclass(frozen=True)
class Batch:
    """Committed contexts and trees in distinct slots; rows of length 0 are padding, their nodes in slot 0."""

    parents: Sequence[Parents]
    committed_lens: Sequence[int]
    window: int | None
    tree: DraftTree
    kv_slots_BT: Tensor
    rows_B: Tensor
    table: Tensor  # entries that no row may read name a slot that there is not
    num_slots: int
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def pool(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """`[U, *shape]`: normal where a node of a row sees it, zero in slot 0, NaN elsewhere."""
        pool = torch.full((self.num_slots + 1, *shape), math.nan, dtype=dtype)
        seen = [self.kv_slots_BT.flatten()]
        for row, length in zip(self.rows_B, self.committed_lens, strict=True):
            begin = 0 if self.window is None else max(0, length + 1 - self.window)
            seen.append(self.table[row, begin:length].long())
        slots = torch.cat(seen)
        pool[slots] = self.normal(len(slots), *shape, dtype=dtype)
        pool[0] = 0
        return pool

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int, Tensor, DraftTree]:
        lens_B = torch.tensor(self.committed_lens)
        return self.table, self.rows_B, lens_B, max(self.committed_lens) + 2, self.kv_slots_BT, self.tree

    def expected(self, q_BTHD: Tensor, keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """The definition along every path; `keys_and_values` gives those of some slots, `[S, G, D]` and `[S, G, V]`."""
        paths = PathBatch.of(self.parents)
        outputs = []
        for row, start, length in zip(paths.rows_S.tolist(), paths.layout.starts, paths.layout.lengths, strict=True):
            own = slice(start, start + length)
            context = self.table[self.rows_B[row], : self.committed_lens[row]].long()
            k_SGD, v_SGV = keys_and_values(torch.cat([context, self.kv_slots_BT[row, paths.nodes_L[own]]]))
            q_LHD = q_BTHD[row, paths.nodes_L[own]]
            outputs.append(attention_reference(q_LHD, k_SGD, v_SGV, scale=SCALE, window=self.window))
        return torch.cat(outputs)[paths.tokens_BT]


def make_batch(
    parents: Sequence[Parents], committed_lens: Sequence[int], window: int | None = None, seed: int = 0
) -> Batch:
    num_rows, num_nodes = len(parents), len(parents[0])
    generator = torch.Generator().manual_seed(seed)
    num_slots = num_rows * num_nodes + sum(committed_lens)
    slots = (torch.randperm(num_slots, generator=generator) + 1).tolist()
    kv_slots_BT = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    rows_B = torch.zeros(num_rows, dtype=torch.int64)
    table = torch.full((num_rows + 2, max(committed_lens) + 3), num_slots + 1, dtype=torch.int32)
    table[0] = 0
    table_rows = (torch.randperm(num_rows + 1, generator=generator) + 1).tolist()
    for row, length in enumerate(committed_lens):
        if length:
            rows_B[row] = table_rows[row]
            table[rows_B[row], :length] = torch.tensor(slots[:length])
            kv_slots_BT[row] = torch.tensor(slots[length : length + num_nodes])
            slots = slots[length + num_nodes :]
    tree = build_tree(parents)
    return Batch(parents, committed_lens, window, tree, kv_slots_BT, rows_B, table, num_slots, generator)


@st.composite
def batches(draw: st.DrawFn, windows: bool = True) -> Batch:
    parents = draw(small_parents())
    lengths = st.lists(st.integers(0, 12), min_size=len(parents), max_size=len(parents))
    window = draw(st.none() | st.integers(1, 14)) if windows else None
    return make_batch(parents, draw(lengths), window, draw(st.integers(0, 2**32 - 1)))


large_batches = st.sampled_from(LARGE_SHAPES).flatmap(
    lambda shape: st.builds(make_batch, st.just(large_parents(shape)), st.just([70, 9]), st.sampled_from([None, 5, 40]))
)


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


def check(actual: Tensor, plain: Tensor, exact: Tensor) -> None:
    """float64: equal to 1e-13 of the largest value. Else at most twice what the definition errs in the same dtype, plus
    one eps of the largest value: softmax weights, which sum to one, and the result may be rounded to the dtype."""
    assert actual.dtype == plain.dtype
    largest = exact.abs().max().item()
    if actual.dtype == torch.float64:
        assert (actual - exact).abs().max() <= 1e-13 * largest
    else:
        assert rms(actual - exact) <= 2 * rms(plain - exact) + torch.finfo(actual.dtype).eps * largest


dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@given(batches() | large_batches, st.sampled_from(HEADS), st.sampled_from([8, 5]), dtypes)
@settings(max_examples=100)
def test_attention_is_the_definition_along_every_path(
    batch: Batch, heads: tuple[int, int], value_dim: int, dtype: torch.dtype
):
    num_heads, num_groups = heads
    k_pool, v_pool = batch.pool(num_groups, 8, dtype=dtype), batch.pool(num_groups, value_dim, dtype=dtype)
    q_BTHD = batch.normal(*batch.kv_slots_BT.shape, num_heads, 8, dtype=dtype)
    o_BTHV = tree_attention(q_BTHD, k_pool, v_pool, *batch.arguments(), scale=SCALE, window=batch.window)
    plain = batch.expected(q_BTHD, lambda slots: (k_pool[slots], v_pool[slots]))
    exact = batch.expected(q_BTHD.double(), lambda slots: (k_pool[slots].double(), v_pool[slots].double()))
    check(o_BTHV, plain, exact)


@given(batches(windows=False) | large_batches.filter(lambda batch: batch.window is None), st.sampled_from([0, 4]))
def test_latent_attention_is_the_definition_along_every_path(batch: Batch, rope_dim: int):
    dtype, num_heads = torch.float64, 3
    latent_pool = batch.pool(6 + rope_dim, dtype=dtype)
    w_k_HDR, w_v_HVR = batch.normal(num_heads, 8, 6, dtype=dtype), batch.normal(num_heads, 5, 6, dtype=dtype)
    q_BTHD = batch.normal(*batch.kv_slots_BT.shape, num_heads, 8 + rope_dim, dtype=dtype)

    def expand(slots: Tensor) -> tuple[Tensor, Tensor]:
        latent_SR, rope_SE = latent_pool[slots].tensor_split([6], dim=-1)
        k_SHD = torch.einsum("sr,hdr->shd", latent_SR, w_k_HDR)
        k_SHD = torch.cat([k_SHD, rope_SE[:, None].expand(-1, num_heads, -1)], dim=-1)
        return k_SHD, torch.einsum("sr,hvr->shv", latent_SR, w_v_HVR)

    o_BTHV = tree_mla(q_BTHD[..., :8], q_BTHD[..., 8:], latent_pool, w_k_HDR, w_v_HVR, *batch.arguments(), scale=SCALE)
    exact = batch.expected(q_BTHD, expand)
    # the absorbed form adds terms up in another order, whose sizes the latent projections set
    assert (o_BTHV - exact).abs().max() <= 1e-12 * exact.abs().max()


@pytest.mark.parametrize("form", ["attention", "latent"])
@given(batch=batches(windows=False).filter(lambda batch: any(batch.committed_lens)), data=st.data())
def test_a_fault_in_the_slots_of_a_node_reaches_its_descendants_only(form: str, batch: Batch, data: st.DataObject):
    row = data.draw(st.sampled_from([row for row, length in enumerate(batch.committed_lens) if length]))
    node = data.draw(st.integers(0, len(batch.parents[0]) - 1))
    keys_too = data.draw(st.booleans())
    dtype = torch.float32
    q_BTHD = batch.normal(*batch.kv_slots_BT.shape, 4, 8, dtype=dtype)
    slot = batch.kv_slots_BT[row, node]
    if form == "attention":
        k_pool, v_pool = batch.pool(2, 8, dtype=dtype), batch.pool(2, 5, dtype=dtype)
        faulty_k_pool = k_pool.index_fill(0, slot, math.nan) if keys_too else k_pool
        clean = tree_attention(q_BTHD, k_pool, v_pool, *batch.arguments(), scale=SCALE)
        v_pool[slot] = math.nan
        faulty = tree_attention(q_BTHD, faulty_k_pool, v_pool, *batch.arguments(), scale=SCALE)
    else:
        pool = batch.pool(6, dtype=dtype)
        w_k_HDR, w_v_HVR = batch.normal(4, 8, 6, dtype=dtype), batch.normal(4, 5, 6, dtype=dtype)
        clean = tree_mla(q_BTHD, q_BTHD[..., :0], pool, w_k_HDR, w_v_HVR, *batch.arguments(), scale=SCALE)
        pool[slot] = math.nan
        faulty = tree_mla(q_BTHD, q_BTHD[..., :0], pool, w_k_HDR, w_v_HVR, *batch.arguments(), scale=SCALE)
    reached_BT = torch.zeros_like(batch.kv_slots_BT, dtype=torch.bool)
    reached_BT[row] = batch.tree.ancestors_BTT[row, :, node]
    assert clean.isfinite().all()
    assert same_bits(faulty[~reached_BT], clean[~reached_BT])
    assert faulty[reached_BT].isnan().all()


def test_padding_rows_see_slot_0_alone():
    batch = make_batch([[0, 0, 1], [0, 0, 0]], [4, 0])
    k_pool, v_pool = batch.pool(2, 8, dtype=torch.float32), batch.pool(2, 5, dtype=torch.float32)
    q_BTHD = batch.normal(2, 3, 4, 8, dtype=torch.float32)
    o_BTHV = tree_attention(q_BTHD, k_pool, v_pool, *batch.arguments(), scale=SCALE)
    assert o_BTHV[0].any()
    assert not o_BTHV[1].any()


def test_positions_of_a_window_count_along_the_path():
    """Root at 5, a child and its child; window 3: each sees itself and the two positions before it, equally."""
    batch = make_batch([[0, 0, 1, 0]], [5], window=3)
    v_pool = torch.arange(batch.num_slots + 1, dtype=torch.float64)[:, None, None]
    q_BTHD = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
    o_BTHV = tree_attention(q_BTHD, torch.zeros_like(v_pool), v_pool, *batch.arguments(), scale=SCALE, window=3)
    context = batch.table[batch.rows_B[0], :5].tolist()
    for node in range(4):
        path = batch.kv_slots_BT[0, path_to(batch.parents[0], node)].tolist()
        seen = [*context, *path][-3:]
        assert o_BTHV[0, node].item() == pytest.approx(sum(seen) / 3)

"""Attention over pool slots against its plain definition, with NaN in every slot that must not be read.

Shapes: as in `ops/attention.py`; U slots of a pool.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops import attention
from hybrid_runtime.ops.attention import (
    attention_reference,
    decode_attention,
    decode_mla,
    prefill_attention,
    prefill_mla,
)
from hybrid_runtime.ops.ragged import RaggedLayout

NUM_SLOTS = 160
SCALE = 0.4


@dataclass(frozen=True)
class Batch:
    """Contexts of 1 to 30 tokens in rows 1.. of a table whose other entries name slots that are NaN."""

    layout: RaggedLayout
    context_lens: tuple[int, ...]
    rows: Tensor
    table: Tensor
    window: int | None
    generator: torch.Generator

    def owned(self) -> list[Tensor]:
        """The KV slots of each sequence."""
        return [self.table[row, :length].long() for row, length in zip(self.rows, self.context_lens, strict=True)]

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def pool(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """`[U, *shape]`: normal in owned slots, zero in slot 0, NaN in all others."""
        pool = torch.full((NUM_SLOTS + 1, *shape), torch.nan, dtype=dtype)
        owned = torch.cat(self.owned())
        pool[owned] = self.normal(len(owned), *shape, dtype=dtype)
        pool[0] = 0
        return pool

    def last_tokens(self) -> Tensor:
        return torch.tensor([start + n - 1 for start, n in zip(self.layout.starts, self.layout.lengths, strict=True)])

    def decode_rows(self, num_padding: int = 2) -> tuple[Tensor, Tensor, int]:
        """Rows, context lengths and their bound for a decode of every sequence and some padding rows."""
        rows_B = torch.cat([self.rows, self.rows.new_zeros(num_padding)])
        context_lens_B = torch.tensor([*self.context_lens, *[1] * num_padding])
        return rows_B, context_lens_B, max(self.context_lens) + 3


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    context_lens = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)))
    lengths = [draw(st.integers(1, length)) for length in context_lens]
    layout = RaggedLayout.build(lengths, num_tokens=sum(lengths) + draw(st.integers(0, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    slots = (torch.randperm(NUM_SLOTS, generator=generator) + 1).int()
    table = slots[-1].repeat(len(lengths) + 3, 36)
    table[0] = 0
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)] + 1
    ends = list(itertools.accumulate(context_lens))
    for row, length, end in zip(rows, context_lens, ends, strict=True):
        table[row, :length] = slots[end - length : end]
    return Batch(layout, context_lens, rows, table, draw(st.none() | st.integers(1, 35)), generator)


heads = st.sampled_from([(1, 1), (3, 1), (2, 2), (6, 2), (3, 3), (9, 3)])


def reference(batch: Batch, q_LHD: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None) -> Tensor:
    """`attention_reference` of every sequence, laid end to end without padding tokens."""
    outputs = []
    for start, length, k_TGD, v_TGV in zip(batch.layout.starts, batch.layout.lengths, keys, values, strict=True):
        outputs.append(attention_reference(q_LHD[start : start + length], k_TGD, v_TGV, scale=SCALE, window=window))
    return torch.cat(outputs)


def pooled_reference(batch: Batch, q_LHD: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
    keys, values = ([pool[slots_T] for slots_T in batch.owned()] for pool in (k_pool, v_pool))
    return reference(batch, q_LHD, keys, values, batch.window)


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


def assert_within_budget(fast: Tensor, plain: Tensor, exact: Tensor, largest_value: Tensor) -> None:
    """`fast` errs at most twice what `plain` errs, plus one eps of the largest value.

    The fast forms may round their softmax weights, which sum to one, and their result to the dtype: half an eps of the
    largest value each.
    """
    floor = torch.finfo(fast.dtype).eps * largest_value.double().item()
    assert rms(fast - exact) <= 2 * rms(plain - exact) + floor


@given(batch=batches(), heads=heads, value_dim=st.sampled_from([8, 5]))
@settings(max_examples=60, deadline=None)
def test_both_forms_are_the_definition_in_float64(batch: Batch, heads: tuple[int, int], value_dim: int) -> None:
    num_heads, num_groups = heads
    k_pool = batch.pool(num_groups, 8, dtype=torch.float64)
    v_pool = batch.pool(num_groups, value_dim, dtype=torch.float64)
    q_LHD = batch.normal(batch.layout.num_tokens, num_heads, 8, dtype=torch.float64)
    expected_LHV = pooled_reference(batch, q_LHD, k_pool, v_pool)
    num_real = expected_LHV.shape[0]

    o_LHV = prefill_attention(
        q_LHD,
        k_pool,
        v_pool,
        batch.table,
        batch.rows,
        torch.tensor(batch.context_lens),
        batch.layout,
        scale=SCALE,
        window=batch.window,
    )
    torch.testing.assert_close(o_LHV[:num_real], expected_LHV, rtol=1e-12, atol=1e-12)
    assert not o_LHV[num_real:].any()

    last_S = batch.last_tokens()
    q_BHD = torch.cat([q_LHD[last_S], batch.normal(2, num_heads, 8, dtype=torch.float64)])
    o_BHV = decode_attention(q_BHD, k_pool, v_pool, batch.table, *batch.decode_rows(), scale=SCALE, window=batch.window)
    torch.testing.assert_close(o_BHV[:-2], expected_LHV[last_S], rtol=1e-12, atol=1e-12)
    assert not o_BHV[-2:].any()  # padding rows see slot 0 alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(batch=batches(), heads=heads, value_dim=st.sampled_from([8, 5]))
@settings(max_examples=40, deadline=None)
def test_both_forms_keep_the_error_budget(
    dtype: torch.dtype, batch: Batch, heads: tuple[int, int], value_dim: int
) -> None:
    num_heads, num_groups = heads
    k_pool = batch.pool(num_groups, 8, dtype=dtype)
    v_pool = batch.pool(num_groups, value_dim, dtype=dtype)
    q_LHD = batch.normal(batch.layout.num_tokens, num_heads, 8, dtype=dtype)
    plain_LHV = pooled_reference(batch, q_LHD, k_pool, v_pool)
    exact_LHV = pooled_reference(batch, q_LHD.double(), k_pool.double(), v_pool.double())
    largest = v_pool[torch.cat(batch.owned())].abs().max()

    o_LHV = prefill_attention(
        q_LHD,
        k_pool,
        v_pool,
        batch.table,
        batch.rows,
        torch.tensor(batch.context_lens),
        batch.layout,
        scale=SCALE,
        window=batch.window,
    )
    assert o_LHV.dtype == dtype
    assert_within_budget(o_LHV[: len(exact_LHV)], plain_LHV, exact_LHV, largest)
    last_S = batch.last_tokens()
    o_BHV = decode_attention(
        q_LHD[last_S], k_pool, v_pool, batch.table, *batch.decode_rows(0), scale=SCALE, window=batch.window
    )
    assert o_BHV.dtype == dtype
    assert_within_budget(o_BHV, plain_LHV[last_S], exact_LHV[last_S], largest)


@dataclass(frozen=True)
class Latent:
    """Operands of latent attention with 3 heads, key dim 6, value dim 5, latent dim 7."""

    q_nope_LHD: Tensor
    q_rope_LHE: Tensor
    latent_pool: Tensor
    w_k_HDR: Tensor
    w_v_HVR: Tensor

    @classmethod
    def draw(cls, batch: Batch, rope_dim: int, dtype: torch.dtype) -> Latent:
        num_tokens = batch.layout.num_tokens
        return cls(
            batch.normal(num_tokens, 3, 6, dtype=dtype),
            batch.normal(num_tokens, 3, rope_dim, dtype=dtype),
            batch.pool(7 + rope_dim, dtype=dtype),
            batch.normal(3, 6, 7, dtype=dtype) / 2,
            batch.normal(3, 5, 7, dtype=dtype) / 2,
        )

    def reference(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Every key and value expanded in `dtype`, then the plain definition."""
        w_k_HDR, w_v_HVR = self.w_k_HDR.to(dtype), self.w_v_HVR.to(dtype)
        keys, values = [], []
        for slots_T in batch.owned():
            latent_TR, rope_TE = self.latent_pool[slots_T, :7].to(dtype), self.latent_pool[slots_T, 7:].to(dtype)
            keys.append(
                torch.stack([torch.cat([latent_TR @ w_DR.T, rope_TE], dim=-1) for w_DR in w_k_HDR.unbind()], dim=1)
            )
            values.append(torch.stack([latent_TR @ w_VR.T for w_VR in w_v_HVR.unbind()], dim=1))
        return reference(batch, torch.cat([self.q_nope_LHD, self.q_rope_LHE], dim=-1).to(dtype), keys, values, None)

    def prefill(self, batch: Batch) -> Tensor:
        return prefill_mla(
            self.q_nope_LHD,
            self.q_rope_LHE,
            self.latent_pool,
            self.w_k_HDR,
            self.w_v_HVR,
            batch.table,
            batch.rows,
            torch.tensor(batch.context_lens),
            batch.layout,
            scale=SCALE,
        )

    def decode(self, batch: Batch, tokens: Tensor, num_padding: int) -> Tensor:
        rows_B, context_lens_B, max_context_len = batch.decode_rows(num_padding)
        return decode_mla(
            self.q_nope_LHD[tokens],
            self.q_rope_LHE[tokens],
            self.latent_pool,
            self.w_k_HDR,
            self.w_v_HVR,
            batch.table,
            rows_B,
            context_lens_B,
            max_context_len,
            scale=SCALE,
        )


@given(batch=batches(), rope_dim=st.sampled_from([0, 4]))
@settings(max_examples=40, deadline=None)
def test_latent_forms_are_the_definition_in_float64(batch: Batch, rope_dim: int) -> None:
    latent = Latent.draw(batch, rope_dim, torch.float64)
    expected_LHV = latent.reference(batch, torch.float64)
    num_real = expected_LHV.shape[0]
    o_LHV = latent.prefill(batch)
    torch.testing.assert_close(o_LHV[:num_real], expected_LHV, rtol=1e-12, atol=1e-12)
    assert not o_LHV[num_real:].any()
    last_S = batch.last_tokens()
    o_BHV = latent.decode(batch, torch.cat([last_S, last_S[:1]]), num_padding=1)
    torch.testing.assert_close(o_BHV[:-1], expected_LHV[last_S], rtol=1e-12, atol=1e-12)
    assert not o_BHV[-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(batch=batches(), rope_dim=st.sampled_from([0, 4]))
@settings(max_examples=40, deadline=None)
def test_latent_forms_keep_the_error_budget(dtype: torch.dtype, batch: Batch, rope_dim: int) -> None:
    """The plain form rounds the expanded keys and values; the absorbed one the query and the output in latent space."""
    latent = Latent.draw(batch, rope_dim, dtype)
    plain_LHV, exact_LHV = latent.reference(batch, dtype), latent.reference(batch, torch.float64)
    values = torch.einsum("ur,hvr->uhv", latent.latent_pool[torch.cat(batch.owned()), :7], latent.w_v_HVR)
    assert_within_budget(latent.prefill(batch)[: len(exact_LHV)], plain_LHV, exact_LHV, values.abs().max())
    last_S = batch.last_tokens()
    o_BHV = latent.decode(batch, last_S, num_padding=0)
    assert o_BHV.dtype == dtype
    assert_within_budget(o_BHV, plain_LHV[last_S], exact_LHV[last_S], values.abs().max())


@pytest.mark.parametrize("window", [None, 3, 150])
def test_queries_in_blocks_are_the_definition(window: int | None) -> None:
    """More queries than a block holds, behind a prefix."""
    length = 2 * attention.QUERY_BLOCK + 5
    generator = torch.Generator().manual_seed(0)
    q_LHD, k_UGD, v_UGD = (
        torch.randn(n, heads, 4, generator=generator, dtype=torch.float64)
        for n, heads in ((length, 2), (length + 8, 1), (length + 8, 1))
    )
    table = torch.cat([torch.zeros(1, length + 7), torch.arange(1, length + 8)[None]]).int()
    o_LHD = prefill_attention(
        q_LHD,
        k_UGD,
        v_UGD,
        table,
        torch.tensor([1]),
        torch.tensor([length + 7]),
        RaggedLayout.build([length]),
        scale=SCALE,
        window=window,
    )
    expected_LHD = attention_reference(q_LHD, k_UGD[1:], v_UGD[1:], scale=SCALE, window=window)
    torch.testing.assert_close(o_LHD, expected_LHD, rtol=1e-12, atol=1e-12)


@given(batch=batches(), heads=heads)
@settings(max_examples=20, deadline=None)
def test_rows_do_not_see_each_other(batch: Batch, heads: tuple[int, int]) -> None:
    num_heads, num_groups = heads
    k_pool, v_pool = (batch.pool(num_groups, 8, dtype=torch.float32) for _ in range(2))
    q_LHD = batch.normal(batch.layout.num_tokens, num_heads, 8, dtype=torch.float32)
    own, first = batch.owned()[0], batch.layout.lengths[0]

    def run(q_LHD: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        o_LHV = prefill_attention(
            q_LHD, k_pool, v_pool, batch.table, batch.rows, torch.tensor(batch.context_lens), batch.layout, scale=SCALE
        )
        q_BHD = q_LHD[batch.last_tokens()]
        return o_LHV, decode_attention(q_BHD, k_pool, v_pool, batch.table, *batch.decode_rows(0), scale=SCALE)

    o_LHV, o_BHV = run(q_LHD, k_pool, v_pool)
    other_q_LHD = torch.cat([q_LHD[:first], -q_LHD[first:]])
    other_k_pool, other_v_pool = -k_pool, -v_pool
    other_k_pool[own], other_v_pool[own] = k_pool[own], v_pool[own]
    other_o_LHV, other_o_BHV = run(other_q_LHD, other_k_pool, other_v_pool)
    assert torch.equal(o_LHV[:first], other_o_LHV[:first])
    assert torch.equal(o_BHV[0], other_o_BHV[0])


@given(batch=batches())
@settings(max_examples=20, deadline=None)
def test_a_pool_of_another_dtype_is_cast_on_read(batch: Batch) -> None:
    k_pool, v_pool = (batch.pool(2, 8, dtype=torch.bfloat16) for _ in range(2))
    q_LHD = batch.normal(batch.layout.num_tokens, 4, 8, dtype=torch.float32)
    results = []
    for k, v in ((k_pool, v_pool), (k_pool.float(), v_pool.float())):
        o_LHV = prefill_attention(
            q_LHD, k, v, batch.table, batch.rows, torch.tensor(batch.context_lens), batch.layout, scale=SCALE
        )
        q_BHD = q_LHD[batch.last_tokens()]
        results.append((o_LHV, decode_attention(q_BHD, k, v, batch.table, *batch.decode_rows(0), scale=SCALE)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])

"""Decode attention over pool slots, split along the context; twins of the decode forms in `ops/attention.py`.

One kernel serves both. Each program reads a split of one row's context once, for all query heads that share its keys,
and leaves a softmax over that split; a second kernel combines the splits of a row.

The grid depends on shapes only. Where a row's splits lie follows on the device from its length, so that a captured
graph serves every length, and a long bound on the context costs nothing but programs that find no split and return.

Shapes: B rows, H query heads, G key-value heads, D key head dim, E key channels behind them that are no values, V value
dim, S splits; of a program: M query heads (padded), T tokens of a block. Latent attention has one key-value head whose
first D key channels are its values: R latent dim = D = V, E rotary dim, C = R + E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from einops import einsum
from torch import Tensor
from torch.library import triton_op, wrap_triton

from hybrid_runtime.ops.ragged import state_dtype_for
from hybrid_runtime.ops.triton_kernels.launch import dense_rows, is_any_double

# Enough programs for each of an H200's 132 processors to hold four; more would only make the combination longer.
TARGET_PROGRAMS = 4 * 132
MAX_SPLITS = 128
MIN_SPLIT_TOKENS = 64  # a shorter split would cost more in partial results than it brings in parallel reads
MIN_DOT_SIZE = 16  # the smallest side of a matrix product in Triton
MAX_HEADS = 32  # query heads of one program
COMBINE_ELEMENTS = 8192


@triton.jit
def _split_bounds(context_len, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr):
    """First visible position of a row, and tokens of each of its splits but the last."""
    first = 0
    if WINDOW is not None:
        first = tl.maximum(context_len - WINDOW, 0)
    blocks = tl.cdiv(context_len - first, MIN_SPLIT_TOKENS)
    return first, tl.cdiv(blocks, NUM_SPLITS) * MIN_SPLIT_TOKENS


@triton.jit
def _multiply(a, b, NARROW: tl.constexpr, dtype: tl.constexpr):
    """Matrix product in `dtype`. That of 16-bit operands is exact up to the summation as it is."""
    return tl.dot(a, b) if NARROW else tl.dot(a.to(dtype), b.to(dtype), input_precision="ieee", out_dtype=dtype)


@triton.jit
def _weigh(weight_MT, v_TV, NARROW: tl.constexpr, dtype: tl.constexpr):
    """Weights times values. Weights for 16-bit values are split into two 16-bit parts, which together keep 16 bits."""
    if NARROW:
        coarse_MT = weight_MT.to(v_TV.dtype)
        fine_MT = (weight_MT - coarse_MT.to(dtype)).to(v_TV.dtype)
        weighed_MV = tl.dot(coarse_MT, v_TV) + tl.dot(fine_MT, v_TV)
    else:
        weighed_MV = _multiply(weight_MT, v_TV, NARROW, dtype)
    return weighed_MV


@triton.jit
def _split_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    req_to_token_ptr,
    rows_ptr,
    context_lens_ptr,
    partial_ptr,
    log_sum_ptr,
    q_stride,
    table_stride,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    EXTRA_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NARROW: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Program (block of heads of a key-value head, split, row): softmax of a split, and the logarithm of its sum."""
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    heads_per_group: tl.constexpr = NUM_HEADS // NUM_GROUPS
    blocks_per_group: tl.constexpr = (heads_per_group + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + row)
    first, split_len = _split_bounds(context_len, WINDOW, NUM_SPLITS, MIN_SPLIT_TOKENS)
    start = first + split * split_len
    if start >= context_len:
        return
    end = tl.minimum(start + split_len, context_len)

    group = tl.program_id(0) // blocks_per_group
    m = (tl.program_id(0) % blocks_per_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head_M1 = (m < heads_per_group)[:, None]
    head_M = group * heads_per_group + m
    d = tl.arange(0, BLOCK_D)[None, :]
    e = tl.arange(0, BLOCK_E)[None, :]
    v = tl.arange(0, BLOCK_V)[None, :]
    t = tl.arange(0, BLOCK_T)
    query_M1 = q_ptr + row * q_stride + head_M[:, None] * (KEY_DIM + EXTRA_DIM)
    q_MD = tl.load(query_M1 + d, mask=is_head_M1 & (d < KEY_DIM), other=0.0)
    if EXTRA_DIM > 0:
        q_ME = tl.load(query_M1 + KEY_DIM + e, mask=is_head_M1 & (e < EXTRA_DIM), other=0.0)
    table_row = req_to_token_ptr + tl.load(rows_ptr + row) * table_stride

    largest_M = tl.full([BLOCK_M], -float("inf"), dtype)
    sum_M = tl.zeros([BLOCK_M], dtype)
    o_MV = tl.zeros([BLOCK_M, BLOCK_V], dtype)
    for position in tl.range(start, end, BLOCK_T):
        # a block may end behind the split: what lies there belongs to others, or to nobody
        is_own_T = position + t < end
        slot_T1 = tl.load(table_row + position + t, mask=is_own_T, other=0).to(tl.int64)[:, None]
        is_own_T1 = is_own_T[:, None]
        key_T1 = k_pool_ptr + (slot_T1 * NUM_GROUPS + group) * (KEY_DIM + EXTRA_DIM)
        k_TD = tl.load(key_T1 + d, mask=is_own_T1 & (d < KEY_DIM), other=0.0)
        score_MT = _multiply(q_MD, tl.trans(k_TD), NARROW, dtype)
        if EXTRA_DIM > 0:
            k_TE = tl.load(key_T1 + KEY_DIM + e, mask=is_own_T1 & (e < EXTRA_DIM), other=0.0)
            score_MT += _multiply(q_ME, tl.trans(k_TE), NARROW, dtype)
        score_MT = tl.where(is_own_T[None, :], score_MT * SCALE, -float("inf"))
        if KEYS_ARE_VALUES:
            v_TV = k_TD
        else:
            value_T1 = v_pool_ptr + (slot_T1 * NUM_GROUPS + group) * VALUE_DIM
            v_TV = tl.load(value_T1 + v, mask=is_own_T1 & (v < VALUE_DIM), other=0.0)

        new_largest_M = tl.maximum(largest_M, tl.max(score_MT, axis=1))
        kept_M = tl.exp(largest_M - new_largest_M)
        weight_MT = tl.exp(score_MT - new_largest_M[:, None])
        sum_M = sum_M * kept_M + tl.sum(weight_MT, axis=1)
        o_MV = o_MV * kept_M[:, None] + _weigh(weight_MT, v_TV, NARROW, dtype)
        largest_M = new_largest_M

    place_M = (row * NUM_HEADS + head_M) * NUM_SPLITS + split
    is_value_MV = is_head_M1 & (v < VALUE_DIM)
    tl.store(partial_ptr + place_M[:, None] * VALUE_DIM + v, o_MV / sum_M[:, None], mask=is_value_MV)
    tl.store(log_sum_ptr + place_M, largest_M + tl.log(sum_M), mask=m < heads_per_group)


@triton.jit
def _combine_kernel(
    partial_ptr,
    log_sum_ptr,
    context_lens_ptr,
    o_ptr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (v block, head, row): the mean of the row's splits, weighted by the sums of their softmaxes."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + row)
    first, split_len = _split_bounds(context_len, WINDOW, NUM_SPLITS, MIN_SPLIT_TOKENS)
    s = tl.arange(0, BLOCK_S)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_v = v < VALUE_DIM
    is_split_S = s < tl.cdiv(context_len - first, split_len)
    place_S = (row * NUM_HEADS + head) * NUM_SPLITS + s
    log_sum_S = tl.load(log_sum_ptr + place_S, mask=is_split_S, other=-float("inf"))
    weight_S = tl.exp(log_sum_S - tl.max(log_sum_S, axis=0))
    weight_S = weight_S / tl.sum(weight_S, axis=0)
    is_own_SV = is_split_S[:, None] & is_v[None, :]
    partial_SV = tl.load(partial_ptr + place_S[:, None] * VALUE_DIM + v[None, :], mask=is_own_SV, other=0.0)
    o_V = tl.sum(weight_S[:, None] * partial_SV, axis=0)
    tl.store(o_ptr + (row * NUM_HEADS + head) * VALUE_DIM + v, o_V.to(o_ptr.dtype.element_ty), mask=is_v)


@triton_op("hybrid_runtime::decode_attention", mutates_args=())
def decode_attention(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token per row, the last of a context of `context_lens_B` (int64, at least 1) tokens.

    Contract of `hybrid_runtime.ops.attention.decode_attention`; the pools are contiguous. Reads each visible key and
    value once (once per 32 query heads, if more share it) and keeps `S H (V + 1)` partial numbers of a row.
    """
    return _attend(
        q_BHD,
        k_pool,
        v_pool,
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
        window=window,
        extra_dim=0,
    )


@triton_op("hybrid_runtime::decode_latents", mutates_args=())
def decode_latents(
    q_BHC: Tensor,
    latent_pool: Tensor,
    latent_dim: int,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """Attention of all heads over one latent per token, `[slots + 1, C]`: the weighted sums of latents `[B, H, R]`."""
    pool_U1C = latent_pool[:, None]
    return _attend(
        q_BHC,
        pool_U1C,
        pool_U1C,
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
        window=None,
        extra_dim=latent_pool.shape[1] - latent_dim,
    )


def decode_mla(
    q_nope_BHD: Tensor,
    q_rope_BHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """Absorbed latent attention of one new token per row; contract of `hybrid_runtime.ops.attention.decode_mla`.

    The maps into and out of the latent space stay batched matrix products; between them each latent is read once (once
    per 32 heads).
    """
    q_latent_BHR = einsum(q_nope_BHD, w_k_HDR, "b h d, h d r -> b h r")
    o_BHR = decode_latents(
        torch.cat([q_latent_BHR, q_rope_BHE], dim=-1),
        latent_pool,
        w_k_HDR.shape[-1],
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
    )
    return einsum(o_BHR, w_v_HVR, "b h r, h v r -> b h v")


@dataclass(frozen=True)
class _Tiling:
    """How one launch is cut, from shapes and dtypes alone.

    A block's tokens are found through the table, so its keys wait for its slots: of n pipeline stages, (n - 1) // 2 - 1
    blocks are on their way while one is worked on. That is 32 KB of a 16-bit pool for each of two or three programs
    that a processor holds. Products of wider operands run outside the tensor cores and keep them in registers: these
    blocks are the largest that spill none.
    """

    heads: int
    tokens: int
    splits: int
    warps: int
    stages: int

    @classmethod
    def of(cls, num_blocks: int, heads: int, num_channels: int, num_visible: int, *, is_narrow: bool) -> _Tiling:
        """`num_blocks`: rows times blocks of heads; `num_channels`: what is read of a token for one key-value head;
        `num_visible`: bound on the tokens a row sees.
        """
        splits = min(
            MAX_SPLITS,
            triton.cdiv(TARGET_PROGRAMS, max(1, num_blocks)),
            triton.cdiv(num_visible, MIN_SPLIT_TOKENS),
        )
        if not is_narrow:
            return cls(heads, 16, splits, 8, 5)
        if num_channels <= 256:
            return cls(heads, 64, splits, 4, 5)
        return cls(heads, 32, splits, 8, 5) if num_channels <= 512 else cls(heads, 16, splits, 8, 7)


def _attend(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
    window: int | None,
    extra_dim: int,
) -> Tensor:
    """Both launches. With an `extra_dim`, or with one pool for both, the values are the first of the key's channels."""
    num_rows, num_heads, _ = q_BHD.shape
    num_groups, key_dim = k_pool.shape[1], k_pool.shape[2] - extra_dim
    value_dim = key_dim if v_pool is k_pool else v_pool.shape[2]
    assert k_pool.is_contiguous()
    assert v_pool.is_contiguous()
    assert req_to_token.stride(1) == 1
    q_BHD, context_lens_B = dense_rows(q_BHD), context_lens_B.contiguous()
    heads_per_group = num_heads // num_groups
    heads = min(MAX_HEADS, max(MIN_DOT_SIZE, triton.next_power_of_2(heads_per_group)))
    head_blocks = num_groups * triton.cdiv(heads_per_group, heads)
    num_visible = max_context_len if window is None else min(window, max_context_len)
    is_narrow = q_BHD.dtype == k_pool.dtype == v_pool.dtype and q_BHD.itemsize == 2
    num_channels = k_pool.shape[2] + (0 if v_pool is k_pool else value_dim)
    tiling = _Tiling.of(num_rows * head_blocks, heads, num_channels, num_visible, is_narrow=is_narrow)
    dtype = state_dtype_for(q_BHD)
    partial_BHSV = torch.empty(num_rows, num_heads, tiling.splits, value_dim, dtype=dtype, device=q_BHD.device)
    log_sum_BHS = torch.empty(num_rows, num_heads, tiling.splits, dtype=dtype, device=q_BHD.device)
    o_BHV = torch.empty(num_rows, num_heads, value_dim, dtype=q_BHD.dtype, device=q_BHD.device)
    shared = {
        "WINDOW": window,
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "NUM_SPLITS": tiling.splits,
        "MIN_SPLIT_TOKENS": MIN_SPLIT_TOKENS,
    }
    wrap_triton(_split_kernel)[head_blocks, tiling.splits, num_rows](
        q_BHD,
        k_pool,
        v_pool,
        req_to_token,
        request_rows_B.contiguous(),
        context_lens_B,
        partial_BHSV,
        log_sum_BHS,
        q_BHD.stride(0),
        req_to_token.stride(0),
        SCALE=scale,
        NUM_GROUPS=num_groups,
        KEY_DIM=key_dim,
        EXTRA_DIM=extra_dim,
        KEYS_ARE_VALUES=v_pool is k_pool,
        BLOCK_M=tiling.heads,
        BLOCK_T=tiling.tokens,
        BLOCK_D=_dot_size(key_dim),
        BLOCK_E=_dot_size(extra_dim),
        BLOCK_V=_dot_size(value_dim),
        NARROW=is_narrow,
        DOUBLE=is_any_double(q_BHD),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **shared,
    )
    block_s = triton.next_power_of_2(tiling.splits)
    block_v = min(_dot_size(value_dim), max(1, COMBINE_ELEMENTS // block_s))
    wrap_triton(_combine_kernel)[triton.cdiv(value_dim, block_v), num_heads, num_rows](
        partial_BHSV, log_sum_BHS, context_lens_B, o_BHV, BLOCK_S=block_s, BLOCK_V=block_v, num_warps=4, **shared
    )
    return o_BHV


def _dot_size(size: int) -> int:
    return max(MIN_DOT_SIZE, triton.next_power_of_2(size))

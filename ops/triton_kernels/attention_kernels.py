"""The two kernels of decode attention: softmax of each split of a context, and the combination of a row's splits.

Shapes: as in `attention.py` beside this file.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _split_bounds(context_len, num_splits, WINDOW: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr):
    """First visible position of a row, and tokens of each of its splits but the last."""
    first = 0
    if WINDOW is not None:
        first = tl.maximum(context_len - WINDOW, 0)
    blocks = tl.maximum(tl.cdiv(context_len - first, MIN_SPLIT_TOKENS), 1)  # of an empty context, too: it has no split
    return first, tl.cdiv(blocks, num_splits) * MIN_SPLIT_TOKENS


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
def split_kernel(
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
    num_splits,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    EXTRA_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
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
    first, split_len = _split_bounds(context_len, num_splits, WINDOW, MIN_SPLIT_TOKENS)
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

    place_M = (row * NUM_HEADS + head_M) * num_splits + split
    is_value_MV = is_head_M1 & (v < VALUE_DIM)
    tl.store(partial_ptr + place_M[:, None] * VALUE_DIM + v, o_MV / sum_M[:, None], mask=is_value_MV)
    tl.store(log_sum_ptr + place_M, largest_M + tl.log(sum_M), mask=m < heads_per_group)


@triton.jit
def combine_kernel(
    partial_ptr,
    log_sum_ptr,
    context_lens_ptr,
    node_partial_ptr,
    node_log_sum_ptr,
    o_ptr,
    num_splits,
    HAS_NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (v block, head, row): the mean of the row's splits, weighted by the sums of their softmaxes.

    With HAS_NODES, that of one part more, which is not of the context, and may be all there is.
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + row)
    first, split_len = _split_bounds(context_len, num_splits, WINDOW, MIN_SPLIT_TOKENS)
    s = tl.arange(0, BLOCK_S)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_v = v < VALUE_DIM
    is_split_S = s < tl.cdiv(context_len - first, split_len)
    place_S = (row * NUM_HEADS + head) * num_splits + s
    log_sum_S = tl.load(log_sum_ptr + place_S, mask=is_split_S, other=-float("inf"))
    largest = tl.max(log_sum_S, axis=0)
    if HAS_NODES:
        node_log_sum = tl.load(node_log_sum_ptr + row * NUM_HEADS + head)
        largest = tl.maximum(largest, node_log_sum)
    weight_S = tl.exp(log_sum_S - largest)
    sum_of_weights = tl.sum(weight_S, axis=0)
    if HAS_NODES:
        node_weight = tl.exp(node_log_sum - largest)
        sum_of_weights += node_weight
    weight_S = weight_S / sum_of_weights
    is_own_SV = is_split_S[:, None] & is_v[None, :]
    partial_SV = tl.load(partial_ptr + place_S[:, None] * VALUE_DIM + v[None, :], mask=is_own_SV, other=0.0)
    o_V = tl.sum(weight_S[:, None] * partial_SV, axis=0)
    if HAS_NODES:
        node_V = tl.load(node_partial_ptr + (row * NUM_HEADS + head) * VALUE_DIM + v, mask=is_v, other=0.0)
        o_V += (node_weight / sum_of_weights) * node_V
    tl.store(o_ptr + (row * NUM_HEADS + head) * VALUE_DIM + v, o_V.to(o_ptr.dtype.element_ty), mask=is_v)

"""The one-token steps of the gated delta rules as one pass over the pool; twins of `ops/gdn.py` and `ops/kda.py`.

Shapes: B rows, G key heads, H value heads (value head h reads key head h // (H // G)), K key dim (of a decay: K or 1),
V value dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from hybrid_runtime.ops.triton_kernels.launch import TILE_WARPS, dense_rows, is_any_double, tile_shape


@triton.jit
def _delta_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_a_ptr,
    beta_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    q_stride,
    k_stride,
    v_stride,
    log_a_stride,
    beta_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS_PER_CHANNEL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Program (v block, head, row): `BLOCK_V` rows of one head's state. A row needs no other row."""
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    is_v = v < VALUE_DIM
    is_k = k < KEY_DIM
    slot = tl.load(slots_ptr + row)

    key_head = (head // HEADS_PER_KEY) * KEY_DIM
    k_K = tl.load(k_ptr + row * k_stride + key_head + k, mask=is_k, other=0.0).to(dtype)
    v_V = tl.load(v_ptr + row * v_stride + head * VALUE_DIM + v, mask=is_v, other=0.0).to(dtype)
    beta = tl.load(beta_ptr + row * beta_stride + head).to(dtype)
    if DECAYS_PER_CHANNEL:
        log_a = tl.load(log_a_ptr + row * log_a_stride + head * KEY_DIM + k, mask=is_k, other=0.0)[None, :]
    else:
        log_a = tl.load(log_a_ptr + row * log_a_stride + head)
    # no decay and no update: the state of the null slot passes through as it is
    a = tl.exp(tl.where(slot == 0, 0.0, log_a.to(dtype)))
    beta = tl.where(slot == 0, 0.0, beta)

    cell = slot * (NUM_HEADS * VALUE_DIM * KEY_DIM) + head * (VALUE_DIM * KEY_DIM)
    cell_VK = pool_ptr + cell + v[:, None] * KEY_DIM + k[None, :]
    is_cell_VK = is_v[:, None] & is_k[None, :]
    state_VK = a * tl.load(cell_VK, mask=is_cell_VK, other=0.0).to(dtype)
    u_V = beta * (v_V - tl.sum(state_VK * k_K[None, :], axis=1))
    state_VK = state_VK + u_V[:, None] * k_K[None, :]
    if slot != 0:
        tl.store(cell_VK, state_VK.to(pool_ptr.dtype.element_ty), mask=is_cell_VK)
    # loaded here: before the update it would be four registers too many
    q_K = tl.load(q_ptr + row * q_stride + key_head + k, mask=is_k, other=0.0).to(dtype)
    y_V = tl.sum(state_VK * q_K[None, :], axis=1)
    tl.store(y_ptr + (row * NUM_HEADS + head) * VALUE_DIM + v, y_V.to(y_ptr.dtype.element_ty), mask=is_v)


def _delta_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_a: Tensor,
    beta_BH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """`log_a`: `[B, H]` or `[B, H, K]`."""
    num_rows, num_heads, value_dim = v_BHV.shape
    _, num_key_heads, key_dim = k_BGK.shape
    assert state_pool.is_contiguous()
    q_BGK, k_BGK, v_BHV = dense_rows(q_BGK), dense_rows(k_BGK), dense_rows(v_BHV)
    log_a, beta_BH = dense_rows(log_a), dense_rows(beta_BH)
    y_BHV = torch.empty(v_BHV.shape, dtype=v_BHV.dtype, device=v_BHV.device)
    is_double = is_any_double(q_BGK, k_BGK, v_BHV, log_a, beta_BH, state_pool)
    block_v, block_k = tile_shape(value_dim, key_dim, is_double=is_double)
    wrap_triton(_delta_step_kernel)[triton.cdiv(value_dim, block_v), num_heads, num_rows](
        q_BGK,
        k_BGK,
        v_BHV,
        log_a,
        beta_BH,
        state_pool,
        slots_B.contiguous(),
        y_BHV,
        q_BGK.stride(0),
        k_BGK.stride(0),
        v_BHV.stride(0),
        log_a.stride(0),
        beta_BH.stride(0),
        NUM_HEADS=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DECAYS_PER_CHANNEL=log_a.ndim == 3,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        DOUBLE=is_double,
        num_warps=TILE_WARPS,
    )
    return y_BHV


@triton_op("hybrid_runtime::gdn_step", mutates_args={"state_pool"})
def gdn_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_a_BH: Tensor,
    beta_BH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token of each row, in place on `state_pool[slots_B]` (`[slots + 1, H, V, K]`); outputs `[B, H, V]`.

    Contract of `hybrid_runtime.ops.gdn.gdn_step`; rows of slot 0 write nothing to the pool, which is contiguous. Each
    state is read once and written once.
    """
    return _delta_step(q_BGK, k_BGK, v_BHV, log_a_BH, beta_BH, state_pool, slots_B)


@triton_op("hybrid_runtime::kda_step", mutates_args={"state_pool"})
def kda_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_a_BHK: Tensor,
    beta_BH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token of each row, in place on `state_pool[slots_B]` (`[slots + 1, H, V, K]`); outputs `[B, H, V]`.

    Contract of `hybrid_runtime.ops.kda.kda_step`; rows of slot 0 write nothing to the pool, which is contiguous. Each
    state is read once and written once.
    """
    return _delta_step(q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH, state_pool, slots_B)

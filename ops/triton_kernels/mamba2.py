"""The Mamba-2 state update as one pass over the pool; twin of `ops/mamba2.py`.

Shapes: B rows, H heads, G groups, P head dim, N state dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from hybrid_runtime.ops.triton_kernels.launch import TILE_WARPS, dense_rows, is_any_double, tile_shape


@triton.jit
def _mamba2_step_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Program (p block, head, row): `BLOCK_P` rows of one head's state, each of them whole."""
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    is_p = p < HEAD_DIM
    is_n = n < STATE_DIM
    slot = tl.load(slots_ptr + row)

    # dt = 0: the state of the null slot passes through as it is
    dt = tl.where(slot == 0, 0.0, tl.load(dt_ptr + row * dt_stride + head).to(dtype))
    kept = tl.exp(dt * tl.load(a_ptr + head).to(dtype))
    x_P = tl.load(x_ptr + row * x_stride + head * HEAD_DIM + p, mask=is_p, other=0.0).to(dtype)
    group = (head // HEADS_PER_GROUP) * STATE_DIM
    b_N = tl.load(b_ptr + row * b_stride + group + n, mask=is_n, other=0.0).to(dtype)
    c_N = tl.load(c_ptr + row * c_stride + group + n, mask=is_n, other=0.0).to(dtype)

    cell = slot * (NUM_HEADS * HEAD_DIM * STATE_DIM) + head * (HEAD_DIM * STATE_DIM)
    cell_PN = pool_ptr + cell + p[:, None] * STATE_DIM + n[None, :]
    is_cell_PN = is_p[:, None] & is_n[None, :]
    state_PN = tl.load(cell_PN, mask=is_cell_PN, other=0.0).to(dtype)
    state_PN = kept * state_PN + (dt * x_P)[:, None] * b_N[None, :]
    if slot != 0:
        tl.store(cell_PN, state_PN.to(pool_ptr.dtype.element_ty), mask=is_cell_PN)
    y_P = tl.sum(state_PN * c_N[None, :], axis=1)
    tl.store(y_ptr + (row * NUM_HEADS + head) * HEAD_DIM + p, y_P.to(y_ptr.dtype.element_ty), mask=is_p)


@triton_op("hybrid_runtime::mamba2_step", mutates_args={"state_pool"})
def mamba2_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    """One token for each row: advances `state_pool[slots_B]` in place and returns `y_BHP`.

    Contract of `hybrid_runtime.ops.mamba2.mamba2_step`; rows of slot 0 write nothing to the pool, which is contiguous.
    Each state is read once and written once.
    """
    num_rows, num_heads, head_dim = x_BHP.shape
    _, num_groups, state_dim = b_BGN.shape
    assert state_pool.is_contiguous()
    x_BHP, dt_BH, b_BGN, c_BGN = dense_rows(x_BHP), dense_rows(dt_BH), dense_rows(b_BGN), dense_rows(c_BGN)
    y_BHP = torch.empty(x_BHP.shape, dtype=x_BHP.dtype, device=x_BHP.device)
    is_double = is_any_double(x_BHP, dt_BH, a_H, b_BGN, c_BGN, state_pool)
    block_p, block_n = tile_shape(head_dim, state_dim, is_double=is_double)
    wrap_triton(_mamba2_step_kernel)[triton.cdiv(head_dim, block_p), num_heads, num_rows](
        x_BHP,
        dt_BH,
        a_H.contiguous(),
        b_BGN,
        c_BGN,
        state_pool,
        slots_B.contiguous(),
        y_BHP,
        x_BHP.stride(0),
        dt_BH.stride(0),
        b_BGN.stride(0),
        c_BGN.stride(0),
        NUM_HEADS=num_heads,
        HEADS_PER_GROUP=num_heads // num_groups,
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        DOUBLE=is_double,
        num_warps=TILE_WARPS,
    )
    return y_BHP

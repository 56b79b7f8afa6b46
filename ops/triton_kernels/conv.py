"""One token of the short convolution as one pass over the windows; twin of `ops/conv.py`.

Shapes: B rows, D channels, W taps; of a window, W counts W - 1 inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from hybrid_runtime.ops.triton_kernels.launch import dense_rows, is_any_double

# Windows are small (0.6 MB for 8 rows of 4352 channels): what counts is that many processors take part at batch 1.
BLOCK_D = 128
NUM_WARPS = 1


@triton.jit
def _conv_step_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    x_stride,
    weight_stride_d,
    weight_stride_w,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Program (channel block, row). Sums in the twin's order, so that both agree bit for bit."""
    dtype: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = d < NUM_CHANNELS
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    is_written = d < tl.where(slot == 0, 0, NUM_CHANNELS)
    x_D = tl.load(x_ptr + row * x_stride + d, mask=is_d, other=0.0)
    weight_D = weight_ptr + d * weight_stride_d
    window_D = pool_ptr + slot * ((NUM_TAPS - 1) * NUM_CHANNELS) + d

    total_D = tl.zeros([BLOCK_D], dtype)
    for w in tl.static_range(NUM_TAPS - 1):
        # in x's dtype, like the twin's, whatever the pool's is
        input_D = tl.load(window_D + w * NUM_CHANNELS, mask=is_d, other=0.0).to(x_D.dtype)
        if w > 0:  # one place down; what was there has been read
            shifted_D = input_D.to(pool_ptr.dtype.element_ty)
            tl.store(window_D + (w - 1) * NUM_CHANNELS, shifted_D, mask=is_written)
        weight = tl.load(weight_D + w * weight_stride_w, mask=is_d, other=0.0).to(dtype)
        total_D += input_D.to(dtype) * weight
    if NUM_TAPS > 1:
        tl.store(window_D + (NUM_TAPS - 2) * NUM_CHANNELS, x_D.to(pool_ptr.dtype.element_ty), mask=is_written)
    weight = tl.load(weight_D + (NUM_TAPS - 1) * weight_stride_w, mask=is_d, other=0.0).to(dtype)
    total_D += x_D.to(dtype) * weight
    if bias_ptr is not None:
        total_D += tl.load(bias_ptr + d, mask=is_d, other=0.0).to(dtype)
    tl.store(y_ptr + row * NUM_CHANNELS + d, total_D.to(y_ptr.dtype.element_ty), mask=is_d)


@triton_op("hybrid_runtime::conv_step", mutates_args={"window_pool"})
def conv_step(x_BD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, window_pool: Tensor, slots_B: Tensor) -> Tensor:
    """One token of each row: outputs `[B, D]` in x's dtype; shifts x into the windows `window_pool[slots_B]` in place.

    Contract of `hybrid_runtime.ops.conv.conv_step`; rows of slot 0 write nothing to the pool, which is contiguous.
    """
    num_rows, num_channels = x_BD.shape
    assert window_pool.is_contiguous()
    x_BD = dense_rows(x_BD)
    y_BD = torch.empty(x_BD.shape, dtype=x_BD.dtype, device=x_BD.device)
    bias = None if bias_D is None else bias_D.contiguous()
    wrap_triton(_conv_step_kernel)[triton.cdiv(num_channels, BLOCK_D), num_rows](
        x_BD,
        weight_DW,
        bias,
        window_pool,
        slots_B.contiguous(),
        y_BD,
        x_BD.stride(0),
        weight_DW.stride(0),
        weight_DW.stride(1),
        NUM_CHANNELS=num_channels,
        NUM_TAPS=weight_DW.shape[1],
        BLOCK_D=BLOCK_D,
        DOUBLE=is_any_double(x_BD, weight_DW),
        num_warps=NUM_WARPS,
    )
    return y_BD

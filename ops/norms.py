"""Normalisations over the last axis: root mean square, gated root mean square, and length.

Shapes: all tensors are `[..., D]`, weights `[D]`. Inside, arithmetic is float32, or float64 for float64 input; results
have the dtype of `x`. Where the result is rounded follows the models that use each form, so that low-precision runs
agree with them bit for bit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from hybrid_runtime.ops.ragged import state_dtype_for


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """`(offset + weight) x / sqrt(mean(x²) + eps)` (Zhang and Sennrich 2019).

    `offset` is 1 where a checkpoint stores the weight's distance from one (Gemma, Qwen3-Next); such models multiply
    before rounding to the dtype of `x`, the others (Llama, Granite, Kimi) after it.
    """
    normed = _root_mean_square(x.to(state_dtype_for(x)), eps)
    if offset:
        return (normed * (offset + weight.to(normed.dtype))).to(x.dtype)
    return weight.to(x.dtype) * normed.to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: Literal["silu", "sigmoid"],
    norm_before_gate: bool,
    group_size: int | None = None,
) -> Tensor:
    """Root mean square norm with weight, and a product with `activation(gate)`; `gate` has the shape of `x`.

    `norm_before_gate`: True normalises `x` and gates the result (Qwen3-Next: silu; Kimi Linear: sigmoid); False
    normalises the gated `x` (Mamba-2, Granite). `group_size` normalises each run of that many channels by itself; None
    takes the whole width. The sigmoid form rounds once, at its end; the silu forms also before the weight.

    Raises ValueError if `group_size` does not divide the width.
    """
    dtype = state_dtype_for(x)
    gate = silu(gate.to(dtype)) if activation == "silu" else torch.sigmoid(gate.to(dtype))
    y = x.to(dtype)
    if not norm_before_gate:
        y = y * gate
    if group_size is None:
        y = _root_mean_square(y, eps)
    else:
        if x.shape[-1] % group_size:
            raise ValueError(f"group_size={group_size} does not divide the width {x.shape[-1]}")
        y = _root_mean_square(y.unflatten(-1, (-1, group_size)), eps).flatten(-2)
    y = weight.to(dtype) * y if activation == "sigmoid" else weight.to(x.dtype) * y.to(x.dtype)
    return (y * gate if norm_before_gate else y).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(sum(x²) + eps)`."""
    y = x.to(state_dtype_for(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _root_mean_square(y: Tensor, eps: float) -> Tensor:
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)

"""A hand-written kernel that needs every repair of the interpreter; for a process whose Triton interprets."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from hybrid_runtime.graphs.lowering.interpreter_repairs import repair_interpreter

SIZE = 16


@triton.jit
def kernel(a_ptr, b_ptr, product_ptr, sum_ptr, tanh_ptr, nan_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a, b = tl.load(a_ptr + places), tl.load(b_ptr + places)
    tl.store(product_ptr + places, tl.dot(a, b))  # of bfloat16
    tl.store(sum_ptr + places, a + b)  # arithmetic in bfloat16
    wide = a.to(tl.float32)
    tl.store(tanh_ptr + places, libdevice.tanh(wide).to(tl.bfloat16))  # libdevice, and a rounding cast
    tl.store(nan_ptr + places, libdevice.isnan(tl.where(wide > 0, float("nan"), wide)).to(tl.int32))


def differences() -> dict[str, float]:
    """Largest difference of each result from PyTorch's, in units of what may differ: at most 1 is right, 0 is equal."""
    repair_interpreter()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator).bfloat16() for _ in range(2))
    product, nan = torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE, dtype=torch.int32)
    total, tanh = torch.empty_like(a), torch.empty_like(a)
    kernel[(1,)](a, b, product, total, tanh, nan, SIZE=SIZE)
    rounding = SIZE * 2.0**-22  # of sums of as many products of about one, in float32
    return {
        "dot": largest(product - a.double() @ b.double()) / rounding,
        "arithmetic": largest(total.double() - (a + b).double()),
        "libdevice and cast": largest(tanh.double() - a.float().tanh().bfloat16().double()),
        "predicate": largest(nan - (a > 0).int()),
    }


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()

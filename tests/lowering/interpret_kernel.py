"""`TRITON_INTERPRET=1 python -m tests.lowering.interpret_kernel`: one kernel that needs every repair of the interpreter."""

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


def main() -> None:
    repair_interpreter()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator).bfloat16() for _ in range(2))
    product, nan = torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE, dtype=torch.int32)
    total, tanh = torch.empty_like(a), torch.empty_like(a)
    kernel[(1,)](a, b, product, total, tanh, nan, SIZE=SIZE)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=0, atol=SIZE * 2**-20)
    equal(total, a + b)
    equal(tanh, a.float().tanh().bfloat16())
    equal(nan, (a > 0).int())


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


if __name__ == "__main__":
    main()

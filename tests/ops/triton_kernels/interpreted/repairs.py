"""A pytest plugin that puts right what Triton's interpreter gets wrong about bfloat16.

The interpreter keeps bfloat16 as bits in uint16 arrays. It truncates float32 where a GPU rounds to nearest even, and
multiplies matrices of bits as if they were numbers.
"""

from __future__ import annotations

import os

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl
_dot = InterpreterBuilder.create_dot


def pytest_configure() -> None:
    """Replaces both for the whole run."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads TRITON_INTERPRET when it is imported"
    InterpreterBuilder.cast_impl = _cast_rounding
    InterpreterBuilder.create_dot = _dot_of_numbers


def _cast_rounding(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
    if target.scalar != tl.bfloat16 or source.dtype.scalar not in (tl.float32, tl.float64):
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float64:
            return TensorHandle(_widen(source.data).astype(np.float64), tl.float64)
        return _cast(self, source, target)
    return TensorHandle(_round(source.data.astype(np.float32)), tl.bfloat16)


def _dot_of_numbers(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, start: TensorHandle, *options: object
) -> TensorHandle:
    if a.dtype.scalar != tl.bfloat16:
        return _dot(self, a, b, start, *options)
    product = np.matmul(_widen(a.data), _widen(b.data), dtype=start.data.dtype)
    return TensorHandle(product + start.data, start.dtype.scalar)


def _widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)

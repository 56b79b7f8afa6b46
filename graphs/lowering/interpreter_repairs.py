"""Puts right what Triton's interpreter computes otherwise than a GPU, for generated and for hand-written kernels.

The interpreter keeps bfloat16 as bits in uint16 arrays. Casts from float32 truncate, where a GPU rounds to nearest
even; matrix products and arithmetic work on the bits as if they were numbers. Functions of libdevice are declarations
of external code and return None.

Triton decides when it is imported whether it interprets: this is for a process started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from torch._inductor.runtime import triton_helpers
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_Array = NDArray[Any]

_SAME_TYPE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "div_rn": np.divide,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fabs": np.abs,
    "floor": np.floor,
    "fma": lambda a, b, c: a * b + c,
    "fmod": np.fmod,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "pow": np.power,
    "rint": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
_PREDICATES: dict[str, Callable[..., Any]] = {
    "finitef": np.isfinite,
    "isfinited": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "signbit": np.signbit,
}


@cache
def repair_interpreter() -> None:
    """Repairs the interpreter for the rest of the process; further calls do nothing.

    Raises RuntimeError in a process whose Triton does not interpret.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton does not interpret: set TRITON_INTERPRET=1 before it is imported")
    InterpreterBuilder.cast_impl = _rounding(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_dot = _multiplying_numbers(InterpreterBuilder.create_dot)
    InterpreterBuilder.binary_op = _computing_in_float32(InterpreterBuilder.binary_op)
    InterpreterBuilder.unary_op = _computing_in_float32(InterpreterBuilder.unary_op)
    for functions, is_predicate in ((_SAME_TYPE, False), (_PREDICATES, True)):
        for name, function in functions.items():
            replacement = _on_tensors(function, is_predicate=is_predicate)
            for module in {libdevice, triton_helpers.libdevice}:
                if hasattr(module, name):
                    setattr(module, name, replacement)


def _rounding(cast: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if after == tl.bfloat16 and before in (tl.float32, tl.float64):
            return TensorHandle(_to_bits(source.data), tl.bfloat16)
        if before == tl.bfloat16 and after in (tl.float32, tl.float64):
            return TensorHandle(_to_numbers(source).astype(_numpy_type(after)), after)
        return cast(self, source, target)

    return cast_impl


def _multiplying_numbers(dot: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return dot(self, a, b, accumulator, *options)
        product = np.matmul(_to_numbers(a), _to_numbers(b), dtype=accumulator.data.dtype)
        return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    return create_dot


def _computing_in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of one or two operands; in bfloat16 it rounds once, as hardware does that computes in float32."""

    def in_float32(self: Any, *arguments: Any) -> Any:
        *operands, function = arguments
        if any(operand.dtype.scalar != tl.bfloat16 for operand in operands):
            return operation(self, *operands, function)
        with np.errstate(all="ignore"):
            result = function(*map(_to_numbers, operands))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_to_bits(result), tl.bfloat16)

    return in_float32


def _on_tensors(function: Callable[..., Any], *, is_predicate: bool) -> Callable[..., Any]:
    """A NumPy function as one of the interpreter's, on tensors and numbers; the result's type is the first tensor's."""

    def applied(*operands: Any, **_: Any) -> Any:
        first = next(operand for operand in operands if isinstance(operand, tl.tensor))
        arrays = [_to_numbers(x.handle) if isinstance(x, tl.tensor) else x for x in operands]
        with np.errstate(all="ignore"):
            result = np.asarray(function(*arrays))
        scalar = tl.int1 if is_predicate else first.dtype
        data = _to_bits(result) if scalar == tl.bfloat16 else result.astype(_numpy_type(scalar))
        return tl.tensor(TensorHandle(data, scalar), tl.block_type(scalar, first.shape) if first.shape else scalar)

    return applied


def _numpy_type(scalar: Any) -> Any:
    return {tl.int1: np.bool_, tl.float16: np.float16, tl.float64: np.float64}.get(scalar, np.float32)


def _to_numbers(handle: Any) -> _Array:
    if handle.dtype.scalar != tl.bfloat16:
        return np.asarray(handle.data)
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _to_bits(numbers: _Array) -> NDArray[np.uint16]:
    """bfloat16 bits of float32 numbers, rounded to nearest even."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)

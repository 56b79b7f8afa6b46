"""Runs a generated CUDA module on CPU tensors, its kernels in Triton's interpreter.

For a process started with TRITON_INTERPRET=1, which can't lower: the module comes as text from another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers

from hybrid_runtime.graphs.lowering.interpreter_repairs import repair_interpreter

_POISON = -7  # in new integer buffers; new floating-point ones are NaN

# What a generated module asks of a device, and what the interpreter's process answers.
_REPLACEMENTS = (
    ("empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda", "empty_strided_cuda = _poisoned"),
    ("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = lambda device: 0"),
    ("with torch.cuda._DeviceGuard(0):", "if True:"),
    ("torch.cuda.set_device(0)", "pass"),
)


def run_generated(code: str, arguments: Sequence[Tensor]) -> tuple[Any, ...]:
    """The results of a generated module called with `arguments`, in the order of its inputs; mutates those it writes.

    Buffers that the module allocates are poisoned. Raises RuntimeError in a process whose Triton does not interpret.
    """
    repair_interpreter()
    triton_helpers.set_driver_to_gpu = lambda: None
    for original, replacement in _REPLACEMENTS:
        code = code.replace(original, replacement)
    header = f"from {__name__} import _poisoned\n"
    module: Any = PyCodeCache.load(header + code)
    return tuple(module.call(list(arguments)))


def _poisoned(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    value = float("nan") if dtype.is_floating_point else _POISON
    return torch.empty_strided(shape, stride, dtype=dtype).fill_(value)

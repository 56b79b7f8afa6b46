"""Linear layers whose weights were laid out for the kernel once, when they were loaded: bfloat16 only.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from hybrid_runtime.ops.cpu_kernels import huge_pages
from hybrid_runtime.ops.cpu_kernels.build import ensure_built, ensure_built_or_building

PANEL_OUTPUTS = 32
# Whether this processor has an instruction for products of bfloat16; without one, these kernels are slow.
MULTIPLIES_BFLOAT16 = bool(torch.cpu.get_capabilities().get("avx512_bf16", False))

_library = torch.library.Library("hybrid_runtime_cpu", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, int num_outputs, Tensor? bias_O) -> Tensor")


def packing_pays(weight: Tensor) -> bool:
    """Whether `pack` takes these weights and this processor multiplies bfloat16, so that packing them pays.

    Where it doesn't, `packed_linear` is right but slow; `linear` reads weights as they are.
    """
    packable = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.dim() == 2
    return packable and MULTIPLIES_BFLOAT16


def pack(weight_OI: Tensor) -> Tensor:
    """The weights as `[panels, pairs, 32, 2]`: 32 outputs by pairs of inputs, with zeros behind the last ones.

    A new bfloat16 tensor, of as many bytes as the weights if O is a multiple of 32 and I of 2; the weights are left as
    they are. Raises ValueError unless they are a bfloat16 matrix on the CPU.
    """
    return pack_all([weight_OI])[0]


def pack_all(weights: Sequence[Tensor]) -> list[Tensor]:
    """As `pack` of each, in one block of huge pages: from memory, weights in pages of 4 kB are read at half the speed.

    `pack` leaves up to 2 MB of each in small pages. The block is freed when no result is alive.
    """
    for weight_OI in weights:
        _require_packable(weight_OI)
    shapes = [(-(-w.shape[0] // PANEL_OUTPUTS), -(-w.shape[1] // 2), PANEL_OUTPUTS, 2) for w in weights]
    block = huge_pages.empty(sum(map(prod, shapes)), torch.bfloat16)
    parts = block.split([prod(shape) for shape in shapes])
    for weight_OI, shape, part in zip(weights, shapes, parts, strict=True):
        num_outputs, num_inputs = weight_OI.shape
        padded = functional.pad(weight_OI, (0, num_inputs % 2, 0, -num_outputs % PANEL_OUTPUTS))
        panels = rearrange(padded, "(panel o) (pair two) -> panel pair o two", o=PANEL_OUTPUTS, two=2)
        part.view(shape).copy_(panels)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _require_packable(weight_OI: Tensor) -> None:
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.bfloat16 or weight_OI.dim() != 2:
        raise ValueError(
            f"only a bfloat16 matrix on the CPU can be packed, not {tuple(weight_OI.shape)} of {weight_OI.dtype} on "
            f"{weight_OI.device}"
        )


def packed_linear(x: Tensor, packed: Tensor, num_outputs: int, bias_O: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with `packed = pack(weight_OI)`; x `[..., I]`, result `[..., num_outputs]`.

    All tensors are bfloat16. Sums are float32, rounded once; bfloat16 inputs that are subnormal may count as zero. A
    row's result does not depend on the other rows, on their number or on the number of threads. Reads the weights once
    from memory.

    Raises ValueError, before anything is read, if x is not contiguous on its last axis, or dtypes or sizes don't fit.
    An odd I can't be told from I + 1.
    """
    if not torch.compiler.is_compiling():
        ensure_built()
    return torch.ops.hybrid_runtime_cpu.packed_linear(x, packed, num_outputs, bias_O)


@torch.library.register_fake("hybrid_runtime_cpu::packed_linear", lib=_library)
def _packed_linear(x: Tensor, packed: Tensor, num_outputs: int, bias_O: Tensor | None) -> Tensor:
    ensure_built_or_building()
    return x.new_empty(*x.shape[:-1], num_outputs)

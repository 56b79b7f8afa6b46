"""What the launches of all kernels have in common.

Blocks, warps and splits follow from shapes. Nothing is tuned when it runs: that would launch candidates on live pools
and wait for the device, which breaks a capture.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

# An H200 moves 4.8 TB/s with some 700 ns of latency, so that about 25 KB of loads have to be in flight on each of its
# 132 processors. A tile of 2048 float32 takes at most 48 registers of each thread of 4 warps: ten such programs fit on
# a processor, 80 KB. Arithmetic in float64, which checks others, needs more registers for each element.
TILE_ELEMENTS = 2048
TILE_ELEMENTS_DOUBLE = 512
TILE_WARPS = 4


def tile_shape(num_rows: int, row_size: int, *, is_double: bool) -> tuple[int, int]:
    """Rows and row elements of a tile `[rows, row]` of whole rows, powers of two."""
    block_row = triton.next_power_of_2(row_size)
    block_rows = (TILE_ELEMENTS_DOUBLE if is_double else TILE_ELEMENTS) // block_row
    return min(triton.next_power_of_2(num_rows), max(1, block_rows)), block_row


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, such that every `tensor[i]` is contiguous. Slices of a projection's output are."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def is_any_double(*tensors: Tensor) -> bool:
    """Whether state arithmetic on these tensors is float64; else it is float32."""
    return any(tensor.dtype == torch.float64 for tensor in tensors)

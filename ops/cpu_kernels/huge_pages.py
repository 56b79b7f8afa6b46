"""Memory in pages of 2 MB, where the system gives them: what is read once per step costs few address translations."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def empty(num_elements: int, dtype: torch.dtype) -> Tensor:
    """As `torch.empty(num_elements, dtype=dtype)`, and starts with a huge page.

    Only whole huge pages are asked for (`madvise`): what is smaller, what is left at the end, and everything on a
    system without them, is ordinary memory.
    """
    num_bytes = num_elements * dtype.itemsize
    huge_bytes = num_bytes - num_bytes % HUGE_PAGE_BYTES
    if not huge_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    # The mapping lives as long as a tensor over it.
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return whole[start : start + num_bytes].view(dtype)

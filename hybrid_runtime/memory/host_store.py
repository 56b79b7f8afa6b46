"""Contents of the second tier in host memory, and the copies between it and the device's pools.

Shapes: N slots of one call; a trailing `...` is what one slot holds in one tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.memory.pools import LayerSpec, Pool, bytes_per_slot
from hybrid_runtime.memory.slots import SlotArray

Rows: TypeAlias = tuple[dict[str, Tensor], ...]
"""Contents of N slots: for each layer the pool's tensors by name, `[N, ...]`."""

MAX_CHUNK_BYTES = 2**25
"""What one copy may hold in between, on its way from one tier to the other."""


class SlotContents(Protocol):
    """Contents of the slots of one pool, outside the device's pools."""

    def write(self, slots: SlotArray, rows: Rows) -> None:
        """Sets the contents of N slots. `rows` may be on any device. Raises OSError where the medium fails."""

    def read(self, slots: SlotArray, device: torch.device) -> Rows:
        """The contents of N slots, as new tensors on `device`. Raises OSError where the medium fails."""

    def close(self) -> None:
        """Gives the memory back. May be called any number of times."""


class MemorySlots:
    """Slots in host memory, pinned for a CUDA device.

    Copies from and to that device are issued on its current stream and not waited for: the stream's order keeps them
    apart from what is computed before and after. Copies from and to host tensors wait for the stream first.
    """

    def __init__(self, layers: Sequence[LayerSpec], num_slots: int, device: torch.device) -> None:
        """`device`: where the pools are that these slots are copied from and to."""
        self._device = device
        self._pool = Pool(layers, num_slots, "cpu")
        pinned: list[Tensor] = []
        self._unpin = weakref.finalize(self, _unpin, pinned, device)
        if device.type == "cuda":
            for tensor in (tensor for layer in self._pool.layers for tensor in layer.values() if tensor.nbytes):
                # Registered, not allocated as pinned: that would round every tensor up to a power of two.
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
                pinned.append(tensor)

    def write(self, slots: SlotArray, rows: Rows) -> None:
        self._wait_unless_on_stream(rows[0] if rows else {})
        for first, place, count in runs(slots):
            for mine, given in zip(self._pool.layers, rows, strict=True):
                for name, tensor in mine.items():
                    tensor[first : first + count].copy_(given[name][place : place + count], non_blocking=True)

    def read(self, slots: SlotArray, device: torch.device) -> Rows:
        rows = tuple(
            {
                name: torch.empty(len(slots), *tensor.shape[1:], dtype=tensor.dtype, device=device)
                for name, tensor in layer.items()
            }
            for layer in self._pool.layers
        )
        self._wait_unless_on_stream(rows[0] if rows else {})
        for first, place, count in runs(slots):
            for mine, given in zip(self._pool.layers, rows, strict=True):
                for name, tensor in mine.items():
                    given[name][place : place + count].copy_(tensor[first : first + count], non_blocking=True)
        return rows

    def close(self) -> None:
        self._unpin()
        self._pool.free()

    def _wait_unless_on_stream(self, layer: dict[str, Tensor]) -> None:
        if self._device.type == "cuda" and any(tensor.device.type != "cuda" for tensor in layer.values()):
            torch.cuda.current_stream(self._device).synchronize()


class PoolSlots:
    """The slots of a pool on the device, for copies from and to the outside."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def write(self, slots: SlotArray, rows: Rows) -> None:
        indices = self._indices(slots)
        for layer, given in zip(self._pool.layers, rows, strict=True):
            for name, tensor in layer.items():
                tensor[indices] = given[name].to(self._device)

    def read(self, slots: SlotArray, device: torch.device) -> Rows:
        indices = self._indices(slots)
        return tuple(
            {name: tensor[indices].to(device) for name, tensor in layer.items()} for layer in self._pool.layers
        )

    def close(self) -> None:
        """Nothing: the pool is the engine's."""

    def _indices(self, slots: SlotArray) -> Tensor:
        return torch.as_tensor(slots.astype(np.int64), device=self._device)


class TierPool:
    """The slots of a pool on the device together with those outside that its contents are copied from and to."""

    def __init__(self, pool: Pool, layers: Sequence[LayerSpec], outside: SlotContents, device: torch.device) -> None:
        self.inside = PoolSlots(pool, device)
        self.outside = outside
        self._device = device
        self._chunk = max(1, MAX_CHUNK_BYTES // max(1, bytes_per_slot(layers)))

    def save(self, sources: SlotArray, destinations: SlotArray) -> None:
        """Copies from the device's slots to those outside."""
        for part in chunks(len(sources), self._chunk):
            self.outside.write(destinations[part], self.inside.read(sources[part], self._device))

    def restore(self, sources: SlotArray, destinations: SlotArray) -> None:
        """Copies from the slots outside to the device's."""
        for part in chunks(len(sources), self._chunk):
            self.inside.write(destinations[part], self.outside.read(sources[part], self._device))


def chunks(length: int, size: int) -> Iterator[slice]:
    """Cuts `range(length)` into pieces of at most `size`."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def runs(slots: SlotArray) -> Iterator[tuple[int, int, int]]:
    """Cuts `slots` where the next is not its predecessor's neighbour: (first slot, place in `slots`, count) each."""
    if not len(slots):
        return
    borders = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = [0, *borders.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
        yield int(slots[start]), start, stop - start


def _unpin(tensors: list[Tensor], device: torch.device) -> None:
    """Lets go of pinned memory, when the last copy from or to it is over."""
    if tensors:
        torch.cuda.synchronize(device)
    while tensors:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(tensors.pop().data_ptr()))

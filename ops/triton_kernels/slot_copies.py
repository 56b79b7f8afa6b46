"""Copies and clears of whole slots in all tensors of a pool, in one launch each; twins of `Pool.copy` and `clear`.

The tensors are many and differ in size, so a kernel finds them through a table in device memory, made once per pool.
Its rows are chunks of a slot: a launch has one program per chunk and slot, each of about the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# 16 bytes a thread and load, four loads of each in flight: 8 KB for 4 warps.
CHUNK_BYTES = 8192
VECTOR_BYTES = 16
NUM_WARPS = 4
TABLE_COLUMNS = 3


@triton.jit
def _copy_slots_kernel(table_ptr, sources_ptr, destinations_ptr, CHUNK_BYTES: tl.constexpr):
    """Program (chunk, pair). Source and destination differ, or else there is nothing to do."""
    entry = table_ptr + tl.program_id(0) * 3
    address = tl.load(entry)
    slot_bytes = tl.load(entry + 1)
    num_bytes = tl.load(entry + 2)
    source = tl.load(sources_ptr + tl.program_id(1))
    destination = tl.load(destinations_ptr + tl.program_id(1))
    if source == destination:
        return
    source = address + source * slot_bytes
    destination = address + destination * slot_bytes
    if (address | slot_bytes | num_bytes) % 16 == 0:
        # int64 pairs; the compiler can't see that they are aligned
        from_ptr = tl.multiple_of(tl.multiple_of(source, 16).to(tl.pointer_type(tl.int64)), 16)
        to_ptr = tl.multiple_of(tl.multiple_of(destination, 16).to(tl.pointer_type(tl.int64)), 16)
        word = tl.arange(0, CHUNK_BYTES // 8)
        is_own = word < tl.multiple_of(num_bytes // 8, 2)
        tl.store(to_ptr + word, tl.load(from_ptr + word, mask=is_own), mask=is_own)
    else:
        from_byte_ptr = source.to(tl.pointer_type(tl.int8))
        to_byte_ptr = destination.to(tl.pointer_type(tl.int8))
        for start in tl.range(0, num_bytes, 1024):
            byte = start + tl.arange(0, 1024)
            tl.store(to_byte_ptr + byte, tl.load(from_byte_ptr + byte, mask=byte < num_bytes), mask=byte < num_bytes)


@triton.jit
def _clear_slots_kernel(table_ptr, slots_ptr, CHUNK_BYTES: tl.constexpr):
    """Program (chunk, slot)."""
    entry = table_ptr + tl.program_id(0) * 3
    address = tl.load(entry)
    slot_bytes = tl.load(entry + 1)
    num_bytes = tl.load(entry + 2)
    cleared = address + tl.load(slots_ptr + tl.program_id(1)) * slot_bytes
    if (address | slot_bytes | num_bytes) % 16 == 0:
        to_ptr = tl.multiple_of(tl.multiple_of(cleared, 16).to(tl.pointer_type(tl.int64)), 16)
        word = tl.arange(0, CHUNK_BYTES // 8)
        zeros = tl.zeros([CHUNK_BYTES // 8], tl.int64)
        tl.store(to_ptr + word, zeros, mask=word < tl.multiple_of(num_bytes // 8, 2))
    else:
        to_byte_ptr = cleared.to(tl.pointer_type(tl.int8))
        for start in tl.range(0, num_bytes, 1024):
            byte = start + tl.arange(0, 1024)
            tl.store(to_byte_ptr + byte, tl.zeros([1024], tl.int8), mask=byte < num_bytes)


@dataclass(frozen=True)
class SlotTable:
    """Where the slots of a pool's tensors lie. Holds for as long as the tensors keep their memory.

    `chunks`: int64 `[chunks, 3]` on the tensors' device: address of the chunk in slot 0, bytes from one slot of its
    tensor to the next, bytes of the chunk.
    """

    tensors: tuple[Tensor, ...]
    chunks: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> SlotTable:
        """Table of tensors `[slots + 1, ...]` on one device. Copies it there, so not inside a capture.

        Raises ValueError for a tensor that is not contiguous or lies elsewhere than the first.
        """
        device = tensors[0].device if tensors else torch.device("cpu")
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.device != device:
                raise ValueError(f"pool tensors must be contiguous and on {device}: {tensor.shape}, {tensor.device}")
        entries = [entry for tensor in tensors for entry in _chunks_of(tensor)]
        chunks = torch.tensor(entries, dtype=torch.int64, device=device).reshape(-1, TABLE_COLUMNS)
        return cls(tuple(tensors), chunks)


def copy_slots(table: SlotTable, sources: Tensor, destinations: Tensor) -> None:
    """In every tensor, slot `destinations[i]` gets what `sources[i]` holds. int64 `[n]` each, on the table's device.

    No slot may be both a source and a destination, save in a pair of a slot with itself, which copies nothing: pairs
    (0, 0) are padding. One launch.
    """
    _copy_slots(list(table.tensors), table.chunks, sources, destinations)


def clear_slots(table: SlotTable, slots: Tensor) -> None:
    """Writes zeros to the given slots (int64 `[n]`, on the table's device) of every tensor. One launch."""
    _clear_slots(list(table.tensors), table.chunks, slots)


# Opaque operators: the kernels see addresses only, so that a compiler that looked inside would think that they change
# nothing. The schema says what changes.
@torch.library.custom_op("hybrid_runtime::copy_slots", mutates_args={"tensors"})
def _copy_slots(tensors: list[Tensor], chunks: Tensor, sources: Tensor, destinations: Tensor) -> None:
    _copy_slots_kernel[chunks.shape[0], sources.shape[0]](
        chunks, sources.contiguous(), destinations.contiguous(), CHUNK_BYTES=CHUNK_BYTES, num_warps=NUM_WARPS
    )


@torch.library.custom_op("hybrid_runtime::clear_slots", mutates_args={"tensors"})
def _clear_slots(tensors: list[Tensor], chunks: Tensor, slots: Tensor) -> None:
    _clear_slots_kernel[chunks.shape[0], slots.shape[0]](
        chunks, slots.contiguous(), CHUNK_BYTES=CHUNK_BYTES, num_warps=NUM_WARPS
    )


@_copy_slots.register_fake
def _(tensors: list[Tensor], chunks: Tensor, sources: Tensor, destinations: Tensor) -> None:
    return


@_clear_slots.register_fake
def _(tensors: list[Tensor], chunks: Tensor, slots: Tensor) -> None:
    return


def _chunks_of(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    slot_bytes = tensor[0].nbytes
    for start in range(0, slot_bytes, CHUNK_BYTES):
        yield tensor.data_ptr() + start, slot_bytes, min(CHUNK_BYTES, slot_bytes - start)

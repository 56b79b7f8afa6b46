"""Contents of the second tier in a file.

Shapes: N slots of one call; a trailing `...` is what one slot holds in one tensor.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybrid_runtime.memory.host_store import Rows, runs
from hybrid_runtime.memory.pools import LayerSpec, bytes_per_slot
from hybrid_runtime.memory.slots import SlotArray


class HostFile:
    """A file of fixed size that is nobody else's: its name is given up as soon as it is open.

    So nothing is left of it however the process ends. It is read and written with system calls and not mapped, since a
    disk that fails under a mapping ends the process.
    """

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        """Creates the file and reserves its bytes on the disk, where the system can.

        Raises ValueError, with nothing left behind, if there is such a file already or the bytes are not available.
        """
        try:
            self._file = open(path, "x+b", buffering=0)  # noqa: SIM115  # closed by close(), or with this object
            Path(path).unlink()
            if hasattr(os, "posix_fallocate") and num_bytes:
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except FileExistsError as error:
            raise ValueError(
                f"host_cache_path={str(path)!r} exists already: name a new file; it is scratch space and begins empty"
            ) from error
        except OSError as error:
            raise ValueError(
                f"host_cache_path={str(path)!r}: a file of {num_bytes:,} B cannot be made there: {error}"
            ) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data`. Raises OSError."""
        while len(data):
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read_into(self, offset: int, data: memoryview) -> None:
        """Fills all of `data`. Raises OSError, also where the file ends early."""
        while len(data):
            count = os.preadv(self._file.fileno(), [data], offset)
            if count == 0:
                raise OSError(errno.EIO, f"the file of the host cache ends at byte {offset}")
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Gives the disk space back."""
        self._file.close()


class FileSlots:
    """Slots as records of one size in a region of a `HostFile`, from byte `offset` on. The null slot has none."""

    def __init__(self, layers: Sequence[LayerSpec], file: HostFile, offset: int) -> None:
        self._layers = layers
        self._file = file
        self._offset = offset
        self._record_bytes = bytes_per_slot(layers)

    def write(self, slots: SlotArray, rows: Rows) -> None:
        records = _pack(rows, len(slots)).numpy().reshape(-1).data
        for first, place, count in runs(slots):
            part = slice(place * self._record_bytes, (place + count) * self._record_bytes)
            self._file.write(self._position(first), records[part])

    def read(self, slots: SlotArray, device: torch.device) -> Rows:
        records = torch.empty(len(slots), self._record_bytes, dtype=torch.uint8)
        view = records.numpy().reshape(-1).data
        for first, place, count in runs(slots):
            part = slice(place * self._record_bytes, (place + count) * self._record_bytes)
            self._file.read_into(self._position(first), view[part])
        return _unpack(records.to(device), self._layers)

    def close(self) -> None:
        self._file.close()

    def _position(self, slot: int) -> int:
        return self._offset + (slot - 1) * self._record_bytes


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of `[N, ...]` as uint8 `[N, bytes of one slot]`, on the CPU."""
    slot_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    if not tensor.numel():
        return torch.empty(len(tensor), slot_bytes, dtype=torch.uint8)
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).reshape(len(tensor), slot_bytes)


def _pack(rows: Rows, num_slots: int) -> Tensor:
    """All that a slot holds, one record per slot: uint8 `[N, record bytes]`, on the CPU."""
    parts = [as_bytes(tensor) for layer in rows for tensor in layer.values()]
    return torch.cat([torch.empty(num_slots, 0, dtype=torch.uint8), *parts], dim=1)


def _unpack(records: Tensor, layers: Sequence[LayerSpec]) -> Rows:
    place = 0
    rows: list[dict[str, Tensor]] = []
    for layer in layers:
        rows.append({})
        for name, spec in layer.items():
            # Copied even if there is one row, which would pass for contiguous with the stride and place of its record.
            part = records[:, place : place + spec.num_bytes].clone(memory_format=torch.contiguous_format)
            rows[-1][name] = part.view(spec.dtype).reshape(len(records), *spec.shape)
            place += spec.num_bytes
    return tuple(rows)

"""Safetensors files that vouch for every byte of themselves, written and read some rows at a time.

The checksum in the metadata is the SHA-256 of the header, with zeros in the checksum's place, followed by the SHA-256
of each tensor's bytes in the order of the header. So rows of all tensors can be written side by side.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.memory.host_file import as_bytes

CHECKSUM = "checksum"
NO_CHECKSUM = "0" * 64
MAX_HEADER_BYTES = 100 * 2**20  # as in the safetensors library
READ_BYTES = 2**24  # read at once while a file is verified

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: `shape[0]` rows, from byte `offset` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_bytes


class CheckedWriter:
    """Writes a file under another name and gives it its own at the end, so that there is never half a file.

    A context manager; an exception inside leaves whatever was at `path`, and no temporary file. Raises OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str],
    ) -> None:
        """`tensors`: dtype and shape of each, `[rows, ...]`."""
        self._path = Path(path)
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        # Tensors of wide elements first, so that each lies at a multiple of its element size.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1][0].itemsize))
        self._header, self._entries = _layout(ordered, {**metadata, CHECKSUM: NO_CHECKSUM})
        self._digests = {name: hashlib.sha256() for name in ordered}
        self._num_rows = dict.fromkeys(ordered, 0)

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self._header) + sum(entry.num_bytes for entry in self._entries.values())

    def write_rows(self, name: str, rows: Tensor) -> None:
        """Appends rows `[n, ...]` to a tensor."""
        entry = self._entries[name]
        assert rows.dtype == entry.dtype
        assert tuple(rows.shape[1:]) == entry.shape[1:]
        data = as_bytes(rows).numpy().reshape(-1).data
        self._digests[name].update(data)
        _write_all(self._file.fileno(), data, entry.offset + self._num_rows[name] * entry.row_bytes)
        self._num_rows[name] += len(rows)

    def __enter__(self) -> CheckedWriter:
        try:
            self._file = open(self._temporary, "xb", buffering=0)  # closed by __exit__
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        assert self._num_rows == {name: entry.shape[0] for name, entry in self._entries.items()}
        checksum = _checksum(self._header, [digest.digest() for digest in self._digests.values()])
        header = self._header.replace(_field(NO_CHECKSUM), _field(checksum))
        _write_all(self._file.fileno(), memoryview(header), 0)
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._path)


class CheckedReader:
    """Opens a file that a `CheckedWriter` wrote and verifies all of it.

    Raises ValueError, saying what is wrong, for any other file; OSError where it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by close()
        try:
            header = self._read_header()
            self.metadata, self.entries = self._parse(header)
            self._verify(header)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `[stop - start, ...]` of a tensor. Raises OSError."""
        entry = self.entries[name]
        flat = torch.empty((stop - start) * entry.row_bytes, dtype=torch.uint8)
        self._read_into(flat.numpy().data, entry.offset + start * entry.row_bytes)
        return flat.view(entry.dtype).reshape(stop - start, *entry.shape[1:])

    def damaged(self, reason: str) -> ValueError:
        """The error that this file is worth, to be raised by the caller."""
        return ValueError(f"{self.path!r} is truncated, corrupted, or no file of this kind: {reason}")

    def _read_header(self) -> bytes:
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise self.damaged(f"it has {size} bytes")
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise self.damaged(f"a header of {length} bytes in a file of {size}")
        header = bytearray(8 + length)
        self._read_into(memoryview(header), 0)
        return bytes(header)

    def _parse(self, header: bytes) -> tuple[dict[str, str], dict[str, TensorEntry]]:
        try:
            content = json.loads(header[8:])
            metadata = content.pop("__metadata__")
            entries = {name: _parse_entry(value, len(header)) for name, value in content.items()}
            checksum = metadata[CHECKSUM]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its header cannot be read ({type(error).__name__}: {error})") from error
        if not all(isinstance(value, str) for value in metadata.values()):
            raise self.damaged("its metadata are not all strings")
        if not re.fullmatch("[0-9a-f]{64}", checksum) or header.count(_field(checksum)) != 1:
            raise self.damaged("its header has no checksum")
        end = len(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            if entry.offset != end:
                raise self.damaged(f"the tensor {name!r} does not follow the one before it")
            end += entry.num_bytes
        size = os.fstat(self._file.fileno()).st_size
        if size != end:
            raise self.damaged(f"it has {size} bytes, and its header speaks of {end}")
        return metadata, entries

    def _verify(self, header: bytes) -> None:
        digests = []
        buffer = memoryview(bytearray(READ_BYTES))
        for entry in self.entries.values():
            digest = hashlib.sha256()
            for start in range(0, entry.num_bytes, READ_BYTES):
                part = buffer[: min(READ_BYTES, entry.num_bytes - start)]
                self._read_into(part, entry.offset + start)
                digest.update(part)
            digests.append(digest.digest())
        stated = self.metadata[CHECKSUM]
        if _checksum(header.replace(_field(stated), _field(NO_CHECKSUM)), digests) != stated:
            raise self.damaged("its checksum does not fit its contents")

    def _read_into(self, data: memoryview, offset: int) -> None:
        while len(data):
            count = os.preadv(self._file.fileno(), [data], offset)
            if count == 0:
                raise self.damaged(f"it ends at byte {offset}")
            data, offset = data[count:], offset + count


def _layout(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header with its length in front, and where each tensor goes in the file."""
    entries: dict[str, TensorEntry] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        entries[name] = TensorEntry(dtype, tuple(shape), end)
        offsets = [end, end + entries[name].num_bytes]
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    moved = {name: TensorEntry(each.dtype, each.shape, each.offset + start) for name, each in entries.items()}
    return len(text).to_bytes(8, "little") + text, moved


def _parse_entry(value: Any, start: int) -> TensorEntry:
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)) or not shape:
        raise ValueError("a tensor's shape or place is not a list of counts")
    entry = TensorEntry(_DTYPES[value["dtype"]], shape, begin + start)
    if entry.num_bytes != end - begin:
        raise ValueError("a tensor's shape does not fit its place")
    return entry


def _field(checksum: str) -> bytes:
    """The checksum as it stands in a header."""
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def _checksum(header: bytes, digests: Sequence[bytes]) -> str:
    return hashlib.sha256(header + b"".join(digests)).hexdigest()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written

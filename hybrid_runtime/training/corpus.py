"""The Python standard library's own sources as a corpus, with a fixed held-out tenth.

A file is held out by the hash of its relative path, so the split does not depend on which other files exist: it is the
same for one Python version on every machine, and nearly the same across versions.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import sysconfig
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path relative to the corpus root, in POSIX form, and its exact text."""

    path: str
    text: str

    @cached_property
    def data(self) -> bytes:
        return self.text.encode()


@dataclass(frozen=True)
class Corpus:
    """All files, each in exactly one half, in the order of their paths."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def stdlib_root() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(path: str) -> bool:
    """Whether the file with this relative POSIX path belongs to the held-out tenth. Depends on nothing but the path."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def read_corpus(root: Path | None = None) -> Corpus:
    """Every `*.py` file under `root` (default: the standard library) that holds valid UTF-8 text and is not empty.

    Installed packages are left out. The few files in other encodings (tests of the tokenizer and of 2to3) are left
    out too, so that text and bytes of a file are the same thing. Line ends are kept as they are.
    """
    root = stdlib_root() if root is None else root
    files = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or not file.is_file():
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text:
            files.append(SourceFile(relative.as_posix(), text))
    return Corpus(
        train=tuple(file for file in files if not is_held_out(file.path)),
        held_out=tuple(file for file in files if is_held_out(file.path)),
    )


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Total size of the files' text."""
    return sum(len(file.data) for file in files)


def xz_bits_per_byte(files: Sequence[SourceFile]) -> float:
    """Bits that `xz -9` spends per byte of text on one tar of the files.

    The tar's own headers are compressed with it and not counted as text; their owners and times are zero, which
    favours xz.
    """
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w") as tar:
        for file in files:
            info = tarfile.TarInfo(file.path)
            info.size = len(file.data)
            tar.addfile(info, io.BytesIO(file.data))
    return 8 * len(lzma.compress(tar_bytes.getvalue(), preset=9)) / num_bytes(files)

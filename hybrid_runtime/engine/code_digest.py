"""A digest of this package's source code, for caches of what is made from it."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import hybrid_runtime

_SUFFIXES = (".py", ".h", ".cpp")


@cache
def code_digest() -> str:
    """Changes whenever a source file of the package does. Reads them all, once per process."""
    root = Path(hybrid_runtime.__file__).parent
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                path = Path(folder) / name
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()

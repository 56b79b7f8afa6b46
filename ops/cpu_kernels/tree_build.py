"""Builds the kernels of speculative verification: a library of their own, so that who drafts nothing compiles none.

As in `build.py`; the two share how a library is built and where it is kept.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache
from pathlib import Path

import torch

from hybrid_runtime.ops.cpu_kernels.build import SOURCES, build_in_background

TREE_SOURCES = SOURCES / "trees"


def start_building_trees() -> None:
    """As `build.start_building`, for these kernels."""
    _building_trees()


def ensure_trees_built_or_building() -> None:
    """As `build.ensure_built_or_building`, for these kernels."""
    if not _building_trees.cache_info().currsize:
        ensure_trees_built()


@cache
def ensure_trees_built() -> None:
    """As `build.ensure_built`, for these kernels."""
    torch.ops.load_library(_building_trees().result())


@cache
def _building_trees() -> Future[Path]:
    return build_in_background("tree_kernels", SOURCES, TREE_SOURCES)

"""The kernels over draft trees are a library of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hybrid_runtime.ops.cpu_kernels.build import SOURCES, build_in_background
from hybrid_runtime.ops.cpu_kernels.tree_build import TREE_SOURCES

# Loads the first library, in a process of its own, and says what operators of it and of the second there are then.
BUILDS_THE_FIRST = """
import torch
from hybrid_runtime.ops import cpu_kernels
from hybrid_runtime.ops.cpu_kernels import tree_twins
cpu_kernels.ensure_built()
for name in ("delta_step", "delta_tree"):
    print(torch._C._dispatch_has_kernel_for_dispatch_key(f"hybrid_runtime_cpu::{name}", "CPU"))
"""


def test_who_drafts_nothing_does_not_load_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BUILDS_THE_FIRST],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert run.stdout.split() == ["True", "False"]


def test_it_is_built_again_for_headers_of_both_and_the_first_for_its_own_only(tmp_path: Path, monkeypatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo > "$2"; fi; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    shared, own = tmp_path / "sources" / "shared.h", tmp_path / "sources" / "trees" / "own.h"
    own.parent.mkdir(parents=True)

    def built() -> tuple[str, str]:
        """The names of the first library and of the second."""
        folders = (shared.parent, own.parent)
        futures = [build_in_background("first", folders[0]), build_in_background("second", *folders)]
        return futures[0].result().name, futures[1].result().name

    for header in (shared, own):
        header.write_text("old")
    before = built()
    own.write_text("new")
    own_changed = built()
    shared.write_text("new")
    both_changed = built()
    assert before[0] == own_changed[0] != both_changed[0]
    assert len({before[1], own_changed[1], both_changed[1]}) == 3


def test_the_package_has_its_sources() -> None:
    assert TREE_SOURCES.parent == SOURCES
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    suffixes = {path.suffix for path in TREE_SOURCES.iterdir()}
    assert suffixes == {".h", ".cpp"}
    assert all(f'"trees/*{suffix}"' in pyproject for suffix in suffixes)

"""When the kernels are built, with what, and what is said if they can't be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_runtime.ops.cpu_kernels import CompilerNotFound, build

# Notes its arguments, and writes them to the file behind -o.
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo library > "$2"; fi
  shift
done
"""


@pytest.fixture
def compile_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calls of a compiler that only notes them; its libraries go to an empty cache."""
    log, compiler = tmp_path / "log", tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return log


def num_compiled(log: Path) -> int:
    return sum("-shared" in line for line in log.read_text().splitlines())


def built() -> Path:
    """The library of a process that has not asked for it before."""
    build._building.cache_clear()
    try:
        return build._building().result()
    finally:
        build._building.cache_clear()


def test_a_library_is_built_once_and_again_for_other_flags(compile_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built()
    assert library.read_text() == "library\n"
    assert built() == library
    assert num_compiled(compile_log) == 1
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"])
    assert built() != library
    assert num_compiled(compile_log) == 2
    assert len(list(library.parent.iterdir())) == 2  # and no half-built files


def test_a_changed_source_is_built_again(compile_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "sources" / "part.h"
    header.parent.mkdir()
    header.write_text("old")
    (header.parent / "kernel.cpp").touch()
    monkeypatch.setattr(build, "SOURCES", header.parent)
    old = built()
    header.write_text("new")
    assert built() != old


def test_a_missing_compiler_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(CompilerNotFound, match=r"need a C\+\+ compiler.*nothing.*set CXX"):
        built()


def test_a_failed_build_says_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-fsyntax-only", "-include", "no_such_header.h"])
    with pytest.raises(RuntimeError, match="no_such_header"):
        built()
    assert not list((tmp_path / "hybrid_runtime").iterdir())


def test_a_trace_waits_for_the_kernels_unless_they_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(build, "ensure_built", lambda: waited.append(True))
    build._building.cache_clear()
    build.ensure_built_or_building()
    assert waited == [True]
    build.start_building()
    build.ensure_built_or_building()
    assert waited == [True]


def test_nothing_is_built_at_import() -> None:
    code = "import hybrid_runtime.ops.cpu_kernels"
    environment = {**os.environ, "CXX": "/nothing"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(__file__).parents[3])


def test_the_kernels_bring_no_second_openmp_runtime() -> None:
    # The sixth field; another process that has built the same may have put its file in the place of ours ("(deleted)").
    mapped = {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    assert any("cpu_kernels_" in path for path in mapped)
    assert len([path for path in mapped if any(name in path for name in ("libgomp", "libomp", "libiomp"))]) == 1

"""Builds the C++ kernels at first use, for this machine's processor, and keeps the library for later processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent
# Contraction is off because the convolution must round as its PyTorch form does; the kernels say where they fuse.
# The kernels run on torch's own threads: no OpenMP runtime is linked, only its `simd` pragmas are read.
# Of what -O3 adds to -O2, only the unrolling of short loops matters to them; the rest takes 3 of 13 seconds.
OPTIMIZATION = ["-O2", "-fpeel-loops", "-fvect-cost-model=dynamic"]
FLAGS = ["-std=c++17", *OPTIMIZATION, "-march=native", "-ffp-contract=off", "-fopenmp-simd", "-fPIC"]


class CompilerNotFound(RuntimeError):
    """The kernels are not built yet, and there is no C++ compiler to build them with."""


def start_building() -> None:
    """Builds the kernels in other threads, if they have to be built. Call `ensure_built` before anything runs them.

    Tracing does not need them: until then it does not wait. Raises CompilerNotFound without a compiler.
    """
    _building()


def ensure_built_or_building() -> None:
    """For a trace, which is a first use, too: the traced program holds the kernels themselves."""
    if not _building.cache_info().currsize:
        ensure_built()


@cache
def ensure_built() -> None:
    """Loads the kernels; builds them first (several seconds) unless an earlier process has left them in the cache.

    The cache is torch's folder for extensions (`TORCH_EXTENSIONS_DIR`); a library there is used if sources, flags,
    torch, compiler and the instructions of this processor are the same. The compiler is `CXX`, or what torch takes.

    Raises CompilerNotFound without a compiler, RuntimeError with the compiler's message if it fails.
    """
    torch.ops.load_library(_building().result())


@cache
def _building() -> Future[Path]:
    return build_in_background("cpu_kernels", SOURCES)


def build_in_background(name: str, *folders: Path) -> Future[Path]:
    """A library of the sources in the last of `folders`, with headers of all: one that is there, or in the making.

    Raises CompilerNotFound without a compiler.
    """
    compiler = cpp_extension.get_cxx_compiler()
    target = _target(compiler)  # here, so that a missing compiler is noticed at once
    executor = ThreadPoolExecutor(max_workers=1)
    future = executor.submit(_built_library, compiler, target, name, folders)
    executor.shutdown(wait=False)
    return future


def _target(compiler: str) -> str:
    """What the compiler knows about this processor."""
    return _run(compiler, ["-march=native", "-E", "-dM", "-x", "c++", os.devnull])


def _built_library(compiler: str, target: str, name: str, folders: Sequence[Path]) -> Path:
    digest = hashlib.sha256("\0".join([target, torch.__version__, *FLAGS]).encode())
    headers = [path for folder in folders for path in sorted(folder.glob("*.h"))]
    sources = sorted(folders[-1].glob("*.cpp"))
    for path in [*headers, *sources]:
        digest.update(path.read_bytes())
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    library = folder / "hybrid_runtime" / f"{name}_{digest.hexdigest()[:20]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            # At once: another process never sees half a library. Two builders write the same.
            _compile(compiler, sources, Path(work)).replace(library)
    return library


def _compile(compiler: str, sources: Sequence[Path], work: Path) -> Path:
    """A library of `sources` in the folder `work`.

    Half of the cores compile: whoever has them built has Inductor's code compiled, too. Each takes one unit, of one or
    more sources: reading torch's headers takes a second per unit.
    """
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    num_units = max(1, min(len(sources), (os.cpu_count() or 1) // 2))

    def compiled(number: int) -> str:
        unit, result = work / f"unit_{number}.cpp", str(work / f"unit_{number}.o")
        unit.write_text("".join(f'#include "{source}"\n' for source in sources[number::num_units]))
        _run(compiler, [*FLAGS, *includes, "-c", str(unit), "-o", result])
        return result

    with ThreadPoolExecutor(num_units) as pool:
        objects = list(pool.map(compiled, range(num_units)))
    library = work / "kernels.so"
    _run(compiler, ["-shared", *objects, "-o", str(library), *libraries, "-ltorch_cpu"])
    return library


def _run(compiler: str, arguments: list[str]) -> str:
    try:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompilerNotFound(
            f"the CPU kernels need a C++ compiler, and {compiler!r} can't be run ({error}); "
            "install one, or set CXX to its path"
        ) from error
    if done.returncode:
        raise RuntimeError(f"{compiler} failed to build the CPU kernels:\n{done.stderr}")
    return done.stdout

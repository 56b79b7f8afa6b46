"""Assembles for Hopper what a call of an operator would launch, without a GPU.

The call runs on CPU tensors, so that shapes, strides and alignments are those of a real call. At each launch the kernel
is specialised and compiled as Triton's own launcher would, and not launched.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Assembled:
    """One launch: its grid, and what ptxas says of its kernel (registers per thread; bytes of the others)."""

    name: str
    grid: tuple[int, ...]
    num_warps: int
    registers: int
    spilled: int
    stack: int
    shared: int
    ptx: str = field(repr=False)


@contextmanager
def assembled_launches() -> Iterator[list[Assembled]]:
    """Every Triton launch inside is compiled for sm_90a and listed, in place of being run."""
    launches: list[Assembled] = []
    backend = make_backend(HOPPER)

    def assemble(kernel: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound_args, specialization, options = bind(*args, **kwargs)
        options, signature, constants, attributes = kernel._pack_args(
            backend, kwargs, bound_args, specialization, options
        )
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=HOPPER, options=options.__dict__)
        usage = resource_usage(compiled.asm["cubin"])
        launches.append(
            Assembled(
                name=kernel.fn.__name__,
                grid=grid,
                num_warps=compiled.metadata.num_warps,
                registers=usage["REG"],
                stack=usage["STACK"],
                shared=compiled.metadata.shared,
                spilled=spilled_bytes(compiled.asm["ptx"]),
                ptx=compiled.asm["ptx"],
            )
        )

    with patch.object(JITFunction, "run", assemble):
        yield launches


def resource_usage(cubin: bytes) -> dict[str, int]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = run_tool("cuobjdump", "-res-usage", str(path)).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", listing)}


def spilled_bytes(ptx: str) -> int:
    """Bytes of spill stores and loads, from a verbose assembly of the PTX."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        options = ["-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}"]  # as Triton assembles
        log = run_tool("ptxas-blackwell", *options, str(path), "-o", "/dev/null").stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills is not None, log
    return int(spills[1]) + int(spills[2])


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / name, *arguments], check=True, capture_output=True, text=True)

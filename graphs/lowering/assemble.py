"""Kernels down to machine code, with Inductor's own options and Triton's own assembler; what the code takes of an SM.

Of the configurations between which autotuning would choose, the first is assembled: it is the one that Inductor runs
before it has timed any.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import _load_triton_kernel_from_source

from hybrid_runtime.graphs.lowering.generated_code import KernelSource

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class MachineCode:
    """Of one kernel in one configuration. Spills and shared memory in bytes, registers per thread."""

    num_registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    num_warps: int
    num_stages: int
    num_configurations: int


def assemble(kernel: KernelSource) -> MachineCode:
    """Compiles a kernel of a generated module for the pretended device. Some tenths of a second."""
    with inductor_config.patch({"compile_threads": 1, "use_static_triton_launcher": False}):
        autotuner: Any = _load_triton_kernel_from_source(kernel.function, kernel.source)
        binary: Any = autotuner._precompile_config(autotuner.configs[0]).kernel
    num_registers, stack = _usage(binary.asm["cubin"])
    spill_stores, spill_loads = _spills(binary.asm["ptx"]) if stack else (0, 0)  # what spills needs a stack
    return MachineCode(
        num_registers=num_registers,
        spill_stores=spill_stores,
        spill_loads=spill_loads,
        shared_memory=binary.metadata.shared,
        num_warps=binary.metadata.num_warps,
        num_stages=binary.metadata.num_stages,
        num_configurations=len(autotuner.configs),
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = _run("cuobjdump", "-res-usage", file.name)
    match = _USAGE.search(output)
    if match is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {output[-300:]}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def _spills(ptx: str) -> tuple[int, int]:
    """Bytes of spill stores and spill loads, as the assembler reports them."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # The older of the two bundled assemblers knows no PTX of this version.
        output = _run(
            "ptxas-blackwell", "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"
        )
    match = _SPILLS.search(output)
    if match is None:
        raise RuntimeError(f"ptxas said nothing of spills: {output[-300:]}")
    return int(match[1]), int(match[2])


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


class KernelCache:
    """Assembles each kernel once: steps of one model have many in common, under names that differ by a number."""

    def __init__(self) -> None:
        self._known: dict[str, MachineCode] = {}

    def assemble(self, kernel: KernelSource) -> MachineCode:
        key = kernel.source.replace(kernel.function, "kernel")
        if key not in self._known:
            self._known[key] = assemble(kernel)
        return self._known[key]

"""What a lowered step must not do: copy a pool, spill, work on the host, or be unsafe to capture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybrid_runtime.graphs.lowering.assemble import MachineCode
from hybrid_runtime.graphs.lowering.capture import LoweredStep
from hybrid_runtime.graphs.lowering.capture_safety import differences_between_runs, unsafe_operations
from hybrid_runtime.graphs.lowering.generated_code import GeneratedModule
from hybrid_runtime.graphs.lowering.step import Step


class Kind(StrEnum):
    """What is wrong."""

    POOL_COPY = "pool copy"  # something of every slot of a pool is allocated, read or written
    MISALIGNED_COPY = "pool copied if misaligned"  # and what is then written to the copy is lost
    SPILL = "spill"
    HOST_WORK = "host work"  # in the generated code: memory of the host, or a wait for a value
    UNSAFE_OPERATION = "unsafe to capture"  # in the step's own operations
    DIFFERS_BETWEEN_RUNS = "differs between runs"  # something that a capture would freeze


@dataclass(frozen=True)
class Finding:
    """`where`: the kernel, buffer or operation; `detail`: what happens there, with its number."""

    kind: Kind
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.detail}"


def source_findings(step: Step) -> Iterator[Finding]:
    """Of the step as it is written; they hold whether or not it lowers. For captured steps only."""
    if not step.is_captured:
        return
    for complaint in unsafe_operations(step):
        yield Finding(Kind.UNSAFE_OPERATION, step.name, complaint)
    if step.trial is not None:
        for difference in differences_between_runs(step.trial):
            yield Finding(Kind.DIFFERS_BETWEEN_RUNS, step.name, difference)


def lowering_findings(
    lowered: LoweredStep, module: GeneratedModule, machine_code: Mapping[str, MachineCode]
) -> Iterator[Finding]:
    """Of what Inductor made of the step."""
    yield from _pool_copies(lowered, module)
    for kernel, code in machine_code.items():
        if code.spill_stores or code.spill_loads:
            detail = f"{code.spill_stores} bytes stored and {code.spill_loads} loaded at {code.num_registers} registers"
            yield Finding(Kind.SPILL, kernel, detail)
    if lowered.step.is_captured:
        yield from _host_work(lowered, module)


def _pool_copies(lowered: LoweredStep, module: GeneratedModule) -> Iterator[Finding]:
    step = lowered.step
    pools = {given.name: given.pool for given in lowered.inputs if given.pool is not None}
    for allocation in module.allocations:
        if step.is_pool_sized(allocation.num_bytes):
            detail = f"allocates {allocation.num_bytes} bytes as {allocation.dtype} {list(allocation.shape)}"
            yield Finding(Kind.POOL_COPY, allocation.name, detail)
    for traffic in itertools.chain.from_iterable(lowered.traffic.values()):
        for verb, accesses in (("reads", traffic.reads), ("writes", traffic.writes)):
            for buffer, num_bytes in accesses.items():
                is_most_of_pool = buffer in pools and 2 * num_bytes >= pools[buffer].num_bytes
                if is_most_of_pool or step.is_pool_sized(num_bytes):
                    yield Finding(Kind.POOL_COPY, traffic.kernel, f"{verb} {num_bytes} bytes of {buffer}")
    for name in module.copied_if_misaligned:
        if name in pools and not pools[name].is_aligned:
            pool = pools[name]
            detail = f"{pool.num_bytes} bytes are copied where the address is no multiple of 16"
            yield Finding(Kind.MISALIGNED_COPY, pool.name, detail)


def _host_work(lowered: LoweredStep, module: GeneratedModule) -> Iterator[Finding]:
    for statement in module.host_work:
        yield Finding(Kind.HOST_WORK, lowered.step.name, statement)
    for constant in lowered.cpu_constants:
        yield Finding(Kind.HOST_WORK, lowered.step.name, f"the constant {constant} lies on the CPU")
    for device in lowered.devices:
        if device != "cuda":
            yield Finding(Kind.HOST_WORK, lowered.step.name, f"runs code on {device}")
    if lowered.capture_obstacle is not None:
        yield Finding(Kind.UNSAFE_OPERATION, lowered.step.name, f"Inductor: {lowered.capture_obstacle}")

"""From a step to its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from hybrid_runtime.graphs.lowering.assemble import MachineCode, assemble
from hybrid_runtime.graphs.lowering.capture import LoweredStep, LoweringError, lower
from hybrid_runtime.graphs.lowering.findings import Finding, lowering_findings, source_findings
from hybrid_runtime.graphs.lowering.generated_code import GeneratedModule, KernelSource, parse_module
from hybrid_runtime.graphs.lowering.report import ExternReport, KernelReport, StepReport
from hybrid_runtime.graphs.lowering.step import Step

Assembler = Callable[[KernelSource], MachineCode]


def examine(step: Step, assembler: Assembler = assemble) -> StepReport:
    """Lowers a step, assembles its kernels and says what it found. To be called under `pretend_cuda`.

    A step that cannot be lowered is reported with the reason. `assembler` may remember kernels of other steps.
    """
    begin = time.perf_counter()
    findings = list(source_findings(step))
    try:
        lowered = lower(step)
    except LoweringError as error:
        return _report(step, begin, findings, refusal=str(error))
    module = parse_module(lowered.code, lowered.sizes)
    codes = {name: assembler(source) for name, source in module.kernels.items() if module.launches[name]}
    findings += lowering_findings(lowered, module, codes)
    pool_names = {given.name: given.pool.name for given in lowered.inputs if given.pool is not None}
    return _report(
        step,
        begin,
        findings,
        kernels=tuple(_kernels(lowered, module, codes)),
        extern_calls=tuple(_extern_calls(lowered, module)),
        allocated=sum(allocation.num_bytes * allocation.times for allocation in module.allocations),
        mutated=tuple(pool_names.get(name, name) for name in lowered.mutated),
    )


def _report(step: Step, begin: float, findings: list[Finding], **results: Any) -> StepReport:
    empty = {"refusal": None, "kernels": (), "extern_calls": (), "allocated": 0, "mutated": ()}
    return StepReport(
        name=step.name,
        is_captured=step.is_captured,
        findings=tuple(findings),
        seconds=round(time.perf_counter() - begin, 2),
        **{**empty, **results},
    )


def _kernels(lowered: LoweredStep, module: GeneratedModule, codes: dict[str, MachineCode]) -> Iterator[KernelReport]:
    for name, code in codes.items():
        num_launches = module.launches[name]
        names = {name, module.kernels[name].function}
        num_read, num_written = _mean_traffic(lowered, names)
        yield KernelReport(name, num_launches, num_launches * num_read, num_launches * num_written, code)


def _extern_calls(lowered: LoweredStep, module: GeneratedModule) -> Iterator[ExternReport]:
    for name, num_calls in module.extern_calls.items():
        num_read, num_written = _mean_traffic(lowered, {name})
        yield ExternReport(name, num_calls, num_calls * num_read, num_calls * num_written)


def _mean_traffic(lowered: LoweredStep, names: set[str]) -> tuple[int, int]:
    """Bytes that one launch of a kernel or call reads and writes, on average over the places it is launched from."""
    found = [each for launches in lowered.traffic.values() for each in launches if each.kernel in names]
    if not found:
        return 0, 0
    return sum(t.num_read for t in found) // len(found), sum(t.num_written for t in found) // len(found)

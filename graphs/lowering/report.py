"""What is told of a step: launches, bytes, registers, findings; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_runtime.graphs.lowering.assemble import MachineCode
from hybrid_runtime.graphs.lowering.findings import Finding


@dataclass(frozen=True)
class KernelReport:
    """A generated or hand-written kernel: launches per step; bytes per step, over all of these launches."""

    name: str
    num_launches: int
    num_read: int
    num_written: int
    machine_code: MachineCode


@dataclass(frozen=True)
class ExternReport:
    """A call of a library (a matrix product, a sort); numbers per step."""

    name: str
    num_calls: int
    num_read: int
    num_written: int


@dataclass(frozen=True)
class StepReport:
    """Of one step. `refusal`: why it could not be lowered, and then all numbers are empty.

    `allocated`: bytes of all buffers that one call allocates, reuse not counted. `mutated`: the arguments written in
    place, pools by name.
    """

    name: str
    is_captured: bool
    refusal: str | None
    kernels: tuple[KernelReport, ...]
    extern_calls: tuple[ExternReport, ...]
    allocated: int
    mutated: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def num_kernel_launches(self) -> int:
        return sum(kernel.num_launches for kernel in self.kernels)

    @property
    def num_extern_calls(self) -> int:
        return sum(call.num_calls for call in self.extern_calls)

    @property
    def num_launches(self) -> int:
        """Kernels and calls of libraries, each of which launches at least once."""
        return self.num_kernel_launches + self.num_extern_calls

    @property
    def num_read(self) -> int:
        return sum(kernel.num_read for kernel in self.kernels) + sum(call.num_read for call in self.extern_calls)

    @property
    def num_written(self) -> int:
        return sum(kernel.num_written for kernel in self.kernels) + sum(call.num_written for call in self.extern_calls)


_COLUMNS = "{:<70} {:>8} {:>10} {:>10} {:>5} {:>6} {:>7} {:>6}"
_HEADINGS = ("step, kernel", "launches", "read MB", "written MB", "regs", "spill", "shared", "warps")


def table(reports: Sequence[StepReport]) -> str:
    """All steps, their kernels and findings, as text of at most 130 columns."""
    lines = [_COLUMNS.format(*_HEADINGS)]
    for report in reports:
        lines += ["", *_rows(report)]
    return "\n".join(lines)


def _rows(report: StepReport) -> Iterator[str]:
    name = report.name if report.is_captured else f"{report.name} (not captured)"
    if report.refusal is not None:
        yield f"{name}: not lowered: {report.refusal}"
    else:
        totals = _traffic(report.num_launches, report.num_read, report.num_written)
        yield _COLUMNS.format(name, *totals, "", "", "", "")
    for kernel in report.kernels:
        code = kernel.machine_code
        yield _COLUMNS.format(
            f"  {_shortened(kernel.name)}",
            *_traffic(kernel.num_launches, kernel.num_read, kernel.num_written),
            code.num_registers,
            code.spill_stores + code.spill_loads,
            code.shared_memory,
            code.num_warps,
        )
    for call in report.extern_calls:
        yield _COLUMNS.format(
            f"  {call.name}", *_traffic(call.num_calls, call.num_read, call.num_written), "", "", "", ""
        )
    yield from (f"  ! {finding}" for finding in report.findings)


def _traffic(num_launches: int, num_read: int, num_written: int) -> tuple[int, str, str]:
    return num_launches, f"{num_read / 1e6:.3f}", f"{num_written / 1e6:.3f}"


def _shortened(name: str, width: int = 66) -> str:
    """Generated names say what was fused at length; their ends tell them apart."""
    return name if len(name) <= width else f"{name[: width - 20]}...{name[-17:]}"


def as_json(reports: Sequence[StepReport]) -> list[dict[str, Any]]:
    """One object per step: the fields of `StepReport`, and the sums in its properties."""
    sums = ("num_kernel_launches", "num_extern_calls", "num_read", "num_written")
    return [{**asdict(report), **{name: getattr(report, name) for name in sums}} for report in reports]

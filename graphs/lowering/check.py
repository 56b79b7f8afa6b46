"""Compares reports with what is allowed: no finding, no refusal of a captured step, no more launches than recorded.

The record is a TOML file with one line per step: its name and its launches (kernels and calls of libraries).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybrid_runtime.graphs.lowering.report import StepReport

_HEADER = """\
# Launches per step (kernels and calls of libraries), lowered for sm_90: the check fails on a step that needs more.
# Written by `make lowering-record`; a number that grows needs a reason in the commit that records it.
"""


def failures(reports: Iterable[StepReport], recorded: Mapping[str, int]) -> list[str]:
    """One line for each thing that must not be; each names its step and the number."""
    found = []
    for report in reports:
        if report.is_captured and report.refusal is not None:
            found.append(f"{report.name}: not lowered: {report.refusal}")
        found += [f"{report.name}: {finding}" for finding in report.findings]
        if report.refusal is not None:
            continue
        limit = recorded.get(report.name)
        if limit is None:
            found.append(f"{report.name}: {report.num_launches} launches, and no number is recorded")
        elif report.num_launches > limit:
            found.append(f"{report.name}: {report.num_launches} launches, recorded are {limit}")
    return found


def read_record(path: Path) -> dict[str, int]:
    """The recorded launches by step. Raises ValueError for a file of another form."""
    record = tomllib.loads(path.read_text())
    for name, launches in record.items():
        if not isinstance(launches, int):
            raise ValueError(f"{path}: {name!r} is {launches!r}, not a number of launches")
    return record


def write_record(path: Path, reports: Iterable[StepReport], recorded: Mapping[str, int]) -> None:
    """Records the launches of these reports over those that `recorded` has for other steps."""
    launches = {report.name: report.num_launches for report in reports if report.refusal is None}
    lines = [f'"{name}" = {number}\n' for name, number in sorted({**recorded, **launches}.items())]
    path.write_text(_HEADER + "".join(lines))

"""Runs named checks and writes down what came of them: one JSON file, and a page."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

Details = dict[str, Any]


class NotHere(Exception):
    """A check that needs something this machine does not have."""


@dataclass(frozen=True)
class Result:
    """`status`: "passed", "failed" or "not run"; `details`: what was measured, or why it is not passed."""

    name: str
    status: str
    seconds: float
    details: Details = field(default_factory=dict)


def run_check(name: str, check: Callable[[], Details], console: Console) -> Result:
    """One check; whatever it raises is its result."""
    start = time.perf_counter()
    try:
        status, details = "passed", check()
    except NotHere as reason:
        status, details = "not run", {"reason": str(reason)}
    except Exception as error:
        console.print(traceback.format_exc(), markup=False)
        status, details = "failed", {"error": f"{type(error).__name__}: {error}"[:2000]}
    result = Result(name, status, time.perf_counter() - start, details)
    console.print(f"{status:8} {result.seconds:7.1f} s  {name}", markup=False)
    return result


def write_report(path: Path, origin: Details, results: list[Result]) -> None:
    """`path` with .json and .md; `origin` says where, when and how."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**origin, "checks": [asdict(result) for result in results]}
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    lines = ["# GPU check", "", *(f"- {key}: {value}" for key, value in origin.items())]
    lines += ["", "| check | result | seconds | |", "|---|---|---|---|"]
    for result in results:
        shown = "; ".join(f"{key} {_shown(value)}" for key, value in result.details.items() if key != "rows")
        cell = shown.replace("|", "\\|").replace("\n", " ")[:400]
        lines.append(f"| {result.name} | {result.status} | {result.seconds:.1f} | {cell} |")
    for result in results:
        for row in result.details.get("rows", []):
            figures = ", ".join(f"{key} {_shown(value)}" for key, value in row.items())
            lines.append(f"\n- {result.name}: {figures}" if row is result.details["rows"][0] else f"- {figures}")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

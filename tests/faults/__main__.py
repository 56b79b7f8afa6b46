"""Plants each fault of the table in a copy of the tracked files, runs its tests there, and prints what came of it.

A fault is caught if its tests are collected and one fails; the same tests pass on an unchanged copy. Exits with 1 if a
fault is missed. `python -m tests.faults WORD ...` plants the faults whose names have one of the words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.fault import Fault, NotBuilt, all_faults, all_not_built
from tests.faults.no_shrinking import PROFILE

ROOT = Path(__file__).parents[2]
NUM_WORKERS = 2
TIMEOUT = 120  # seconds for the tests of one fault
BASELINE_TIMEOUT = 1200  # and for all tests on the unchanged copy
WIDTH = 200
ALL_PASSED, SOME_FAILED = 0, 1  # exit statuses of pytest; others mean that tests could not be run


@dataclass(frozen=True)
class Outcome:
    """Whether a fault was caught; if not, what happened instead."""

    is_caught: bool
    report: str


def main(words: Sequence[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    faults = [fault for fault in all_faults() if not words or any(word in fault.name for word in words)]
    tests = sorted({test for fault in faults for test in fault.tests})
    console.print(f"{len(faults)} faults; first their {len(tests)} tests on an unchanged copy")
    baseline = try_fault(None, tests, timeout=BASELINE_TIMEOUT)
    if baseline.is_caught or baseline.report:
        console.print(f"these fail, or cannot be run, with no fault planted:\n{baseline.report}", markup=False)
        return 1
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        outcomes = list(pool.map(lambda fault: try_fault(fault, fault.tests), faults))
    console.print(_table(faults, outcomes, [] if words else all_not_built()))
    missed = [(fault, outcome) for fault, outcome in zip(faults, outcomes, strict=True) if not outcome.is_caught]
    for fault, outcome in missed:
        console.print(f"\nMISSED: {fault.name}\n{outcome.report}", markup=False)
    console.print(f"{len(faults) - len(missed)} caught, {len(missed)} missed")
    return 1 if missed else 0


def try_fault(fault: Fault | None, tests: Sequence[str], *, timeout: int = TIMEOUT) -> Outcome:
    """Runs tests in a copy of the tracked files with a fault planted; None: as they are."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder)
        copy_tracked_files(copy)
        if fault is not None:
            fault.plant(copy)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.faults.no_shrinking",
        ]
        if fault is None:
            command.remove("-x")
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=copy,
                env={**os.environ, "HYPOTHESIS_PROFILE": PROFILE, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, f"no end after {timeout} s")
    end = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    return Outcome(done.returncode == SOME_FAILED, "" if done.returncode == ALL_PASSED and fault is None else end)


def copy_tracked_files(destination: Path) -> None:
    """Copies what is under version control, as it is in the working tree; links stay links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not (ROOT / name).exists() and not (ROOT / name).is_symlink():
            continue  # removed in the working tree
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, destination / name, follow_symlinks=False)


def _table(faults: Sequence[Fault], outcomes: Sequence[Outcome], not_built: Sequence[NotBuilt]) -> Table:
    table = Table(title="Planted faults", show_lines=True)
    for heading in ("fault, and what a user would notice", "planted change", "tests", "result"):
        table.add_column(heading, overflow="fold")
    for fault, outcome in zip(faults, outcomes, strict=True):
        kind = f"\n\\[{fault.kind}]" if fault.kind else ""
        changes = [line for edit in fault.edits for line in (edit.file, *edit.changed_lines())]
        table.add_row(
            f"[bold]{fault.name}[/bold]\n{fault.harm}{kind}",
            "\n".join(line.replace("[", "\\[") for line in changes),
            "\n".join(test.removeprefix("tests/").replace("::", "\n  ").replace("[", "\\[") for test in fault.tests),
            "[green]caught[/green]" if outcome.is_caught else "[red]MISSED[/red]",
        )
    for entry in not_built:
        table.add_row(f"[bold]{entry.kind}[/bold]", f"till then: {entry.stand_in}", "", f"not built yet: {entry.needs}")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

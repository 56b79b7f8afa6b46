"""Plants each fault of the table in a copy of the sources, runs its tests there, and prints what came of it.

    python -m tests.faults [--list] [WORD ...]

A fault is caught if each of its tests fails; the same tests pass on an unchanged copy. Exits with 1 if one is missed.
With words, only faults whose names hold one of them are planted; `--list` prints the names, and plants nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.faults.experiment import ALL_PASSED, run_tests, why_missed
from tests.faults.fault import Fault, NotBuilt, all_faults, all_not_built

NUM_WORKERS = 2
BASELINE_TIMEOUT = 900  # seconds for all tests on the unchanged copy
WIDTH = 200  # of a table that goes to no terminal


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    words: list[str] = options.words
    faults = [fault for fault in all_faults() if not words or any(word in fault.name for word in words)]
    if not faults:
        parser.error(f"no fault's name holds {' or '.join(map(repr, words))}: --list prints them")
    if options.list:
        print(*(fault.name for fault in faults), sep="\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    tests = sorted({test for fault in faults for test in fault.tests})
    console.print(f"{len(faults)} faults; first their {len(tests)} tests on an unchanged copy")
    baseline = run_tests(None, tests, timeout=BASELINE_TIMEOUT)
    if baseline.status != ALL_PASSED:
        console.print(f"tests fail with no fault planted:\n{baseline.output}", markup=False)
        return 1
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        reasons = list(pool.map(lambda fault: why_missed(fault, run_tests(fault, fault.tests)), faults))
    console.print(_table(faults, reasons, [] if words else all_not_built()))
    missed = {fault.name: reason for fault, reason in zip(faults, reasons, strict=True) if reason is not None}
    for name, reason in missed.items():
        console.print(f"\nMISSED: {name}\n{reason}", markup=False)
    console.print(f"{len(faults) - len(missed)} caught, {len(missed)} missed")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Plants each fault of the table in a copy of the sources and sees whether its tests fail: minutes.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="plant only faults whose names hold one of the words")
    parser.add_argument("--list", action="store_true", help="print the faults' names, and plant nothing")
    return parser


def _table(faults: Sequence[Fault], reasons: Sequence[str | None], not_built: Sequence[NotBuilt]) -> Table:
    table = Table(title="Planted faults", show_lines=True)
    for heading in ("fault, and what a user would notice", "planted change", "tests", "result"):
        table.add_column(heading, overflow="fold")
    for fault, reason in zip(faults, reasons, strict=True):
        kind = f"\n({fault.kind})" if fault.kind else ""
        changes = [line for edit in fault.edits for line in (edit.file, *edit.changed_lines())]
        table.add_row(
            f"[bold]{escape(fault.name)}[/bold]\n{escape(fault.harm + kind)}",
            escape("\n".join(changes)),
            escape("\n".join(test.removeprefix("tests/").replace("::", "\n  ", 1) for test in fault.tests)),
            "[green]caught[/green]" if reason is None else "[red]MISSED[/red]",
        )
    for entry in not_built:
        table.add_row(
            f"[bold]{escape(entry.kind)}[/bold]",
            f"until then: {escape(entry.stand_in)}",
            "",
            f"not built yet: {escape(entry.needs)}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the benchmarks of rollbacks measured last, as text: times of verify and commit, memory of records.

In a clone of the repository only: an installed package has no results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "profiles" / "results"
TIMINGS, MEMORY = "bench_speculative_ops.json", "bench_speculative_memory.json"
"""`python profiles/<the same name>.py --out profiles/results/<name>` writes them."""

Record = dict[str, Any]


def print_timings(folder: Path = RESULTS) -> None:
    """Microseconds per layer of both parts of a round, by each rollback, and the commit's share of the two.

    Says so if nothing was measured.
    """
    record = _read(folder / TIMINGS)
    if record is None:
        return
    print(f"{'layer':7} {'tree':13} rows accepted  {'rollback':8} {'verify':>9} {'commit':>9}  share")
    previous = None
    for row in record["figures"]["rows"]:
        case = row["op"], row["tree"], row["rows"], row["accepted"]
        name, tree, num_rows, num_accepted = case if case != previous else ("", "", "", "")
        previous = case
        share = row["commit_us"] / (row["verify_us"] + row["commit_us"])
        print(
            f"{name:7} {tree:13} {num_rows:>4} {num_accepted:>8}  {row['rollback']:8} "
            f"{row['verify_us']:6,.0f} us {row['commit_us']:6,.0f} us {share:6.0%}"
        )
    _print_origin(record)


def print_memory(folder: Path = RESULTS) -> None:
    """GB of 32 layers and 32 requests, extrapolated from what few layers took: before a round, at the most within one.

    Says so if nothing was measured.
    """
    record = _read(folder / MEMORY)
    if record is None:
        return
    print(f"{'':20} {record['figures']['num_nodes']} nodes   planned  resident      peak")
    for row in record["figures"]["rows"]:
        sizes = (row["resident_planned"], row["resident_extrapolated"], row["peak_extrapolated"])
        print(f"{row['layer']:20} {row['rollback']:8} " + " ".join(f"{size / 1e9:6.2f} GB" for size in sizes))
    _print_origin(record)


def _read(path: Path) -> Record | None:
    if path.is_file():
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        return record
    print(f"{path.name} is not there: nothing was measured.")
    return None


def _print_origin(record: Record) -> None:
    print(f"\n{record['machine']}, commit {record['commit']}\n{record['command']}")

"""The times of verify and commit that were measured last, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "profiles" / "results" / "bench_speculative_ops.json"
"""In a clone of the repository; `profiles/bench_speculative_ops.py --out` writes it."""


def print_timings(path: Path = RESULTS) -> None:
    """Microseconds per layer of both parts of a round, by each rollback, and the commit's share of the two.

    Says so if nothing was measured, as in an installed package, which has no results.
    """
    if not path.is_file():
        print(f"{path.name} is not there: nothing was measured.")
        return
    print("\n".join(line.rstrip() for line in _lines(json.loads(path.read_text(encoding="utf-8")))))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield f"{'layer':7} {'tree':13} rows accepted  {'rollback':8} {'verify':>9} {'commit':>9}  share"
    previous = None
    for row in record["figures"]["rows"]:
        case = row["op"], row["tree"], row["rows"], row["accepted"]
        name, tree, num_rows, num_accepted = case if case != previous else ("", "", "", "")
        previous = case
        share = row["commit_us"] / (row["verify_us"] + row["commit_us"])
        yield (
            f"{name:7} {tree:13} {num_rows:>4} {num_accepted:>8}  {row['rollback']:8} "
            f"{row['verify_us']:6,.0f} us {row['commit_us']:6,.0f} us {share:6.0%}"
        )
    yield ""
    yield f"{record['machine']}, commit {record['commit']}"
    yield record["command"]

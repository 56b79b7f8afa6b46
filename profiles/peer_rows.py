"""Rows of engine benchmarks, one JSON object a line, and a table that sets engines side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Row = dict[str, Any]

_KEYS = ("tok_s", "ms_step", "ttft_warm_s", "seconds")  # the figure of a row that is compared: the first that it has
_UNITS = {"tok_s": "tok/s", "ms_step": "ms/step", "ttft_warm_s": "ms to first token", "seconds": "s"}
_SIZES = ("tokens", "batch", "prefix")


def read_rows(path: Path) -> list[Row]:
    """Rows from what a benchmark printed; other lines are left out."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def case_of(row: Row) -> str:
    """What was measured: the same for the same case of any engine."""
    return " ".join([row["case"], *(str(row[size]) for size in _SIZES if size in row)])


def speedup(row: Row, peer: Row) -> float | None:
    """How many times faster a row is than a peer's of the same case; None if the peer has no figure."""
    key = _figure(row)
    if key is None or key not in peer:
        return None
    return row[key] / peer[key] if key == "tok_s" else peer[key] / row[key]


def comparison(rows: Sequence[Row], peers: Sequence[Row]) -> Table:
    """One line per case: the figure, its share of what the machine allows, and each peer's figure."""
    engines = list(dict.fromkeys(peer["engine"] for peer in peers))
    table = Table("case", "figure", "of the limit", *engines)
    for row in rows:
        key = _figure(row)
        if key is None:
            continue
        share = row.get("share_of_limit")
        found = {peer["engine"]: peer for peer in peers if case_of(peer) == case_of(row)}
        others = [_beside(row, key, found[engine]) if engine in found else "" for engine in engines]
        table.add_row(case_of(row), _shown(row, key), "" if share is None else f"{share:.0%}", *others)
    return table


def _figure(row: Row) -> str | None:
    return next((key for key in _KEYS if key in row), None)


def _shown(row: Row, key: str) -> str:
    value = 1000 * row[key] if key == "ttft_warm_s" else row[key]
    return f"{value:,.1f} {_UNITS[key]}"


def _beside(row: Row, key: str, peer: Row) -> str:
    ratio = speedup(row, peer)
    return str(peer.get("error", "")) if ratio is None else f"{_shown(peer, key)} ({ratio:.2f}x)"

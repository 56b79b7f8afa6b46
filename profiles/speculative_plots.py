"""Sections of the page of plots on speculative decoding: its speed, the rollbacks of one layer, their memory.

Shapes: N rows, T nodes of a tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from drawing import Draw, Record, Row, origin, save, save_panels
from matplotlib.axes import Axes

EXTRAPOLATED = "extrapolated: 32 layers, 32 rows"  # what `bench_speculative_memory.py` extrapolates to
SMALL = 7  # points, of the figures at bars


def _speeds(path: Path, record: Record) -> list[str]:
    rows: list[Row] = [row for row in record["figures"]["rows"] if row["setting"] != "plain"]
    title = "Speculative decoding, tokens per second over plain decoding"
    height = 1.5 + 0.45 * len({row["setting"] for row in rows})
    save(path.with_suffix(".svg"), title, partial(_draw_speeds, rows=rows), height=height)
    return _section("Speculative decoding", title, path, record)


def _rollbacks(path: Path, record: Record) -> list[str]:
    rows: list[Row] = record["figures"]["rows"]
    panels = {name: partial(_draw_rollbacks, rows=own) for name, own in _by_panel(rows).items()}
    title = "Verify and commit of N rows, milliseconds per layer over the nodes T of a tree"
    save_panels(path.with_suffix(".svg"), title, panels, columns=len({row["op"] for row in rows}), height=7.0)
    return _section("Rollbacks", title, path, record)


def _memory(path: Path, record: Record) -> list[str]:
    """A panel for each number of layers that was measured, and one of what that was extrapolated to."""
    figures: Record = record["figures"]
    rows: list[Row] = figures["rows"]
    labels = [f"{row['layer']}, {row['rollback']}" for row in rows]
    panels: dict[str, Draw] = {}
    for depth in rows[0]["measured"]:
        sizes = [(row["measured"][depth]["resident"], row["measured"][depth]["peak"]) for row in rows]
        panels[f"measured: {depth} layers, {figures['num_rows']} rows"] = partial(
            _draw_memory, labels=labels, sizes=sizes
        )
    far = [(row["resident_extrapolated"], row["peak_extrapolated"]) for row in rows]
    panels[EXTRAPOLATED] = partial(_draw_memory, labels=labels, sizes=far, hatch="//")
    title = f"GB that rollbacks of {figures['num_nodes']} nodes hold (resident) and need at most (peak)"
    save_panels(path.with_suffix(".svg"), title, panels, columns=1, height=2.0 + 0.9 * len(rows))
    return _section("Memory of rollbacks", title, path, record)


SECTIONS: Mapping[str, Callable[[Path, Record], list[str]]] = {
    "bench_speculative": _speeds,
    "bench_speculative_ops": _rollbacks,
    "bench_speculative_memory": _memory,
}
"""By the stem of the file that each is drawn from: its lines, after its plot has been written beside that file."""


def _section(heading: str, title: str, path: Path, record: Record) -> list[str]:
    return [f"## {heading}, {path.stem}", f"![{title}]({path.stem}.svg)", origin(path, record)]


def _draw_speeds(axes: Axes, rows: Sequence[Row]) -> None:
    """A group of bars for each setting, one for each batch size; 1 is plain decoding at the same batch size."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    for number, batch in enumerate(batches):
        own = [row for row in rows if row["batch"] == batch]
        places = [settings.index(row["setting"]) + (number - (len(batches) - 1) / 2) * 0.27 for row in own]
        drawn = axes.barh(places, [row["times_plain"] for row in own], height=0.25, label=f"batch {batch}")
        axes.bar_label(drawn, fmt="{:.2f}", padding=3, fontsize=SMALL)
    axes.axvline(1.0, color="grey", linestyle="--", label="plain decoding")
    axes.set(yticks=range(len(settings)), yticklabels=settings)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    axes.legend(loc="center right")


def _by_panel(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Those of one layer and number of rows, by the title of their panel; all layers of one number in a line."""
    cases = sorted({(row["rows"], row["op"]) for row in rows})
    return {
        f"{op}, N = {count}": [row for row in rows if (row["rows"], row["op"]) == (count, op)] for count, op in cases
    }


def _draw_rollbacks(axes: Axes, rows: Sequence[Row]) -> None:
    """Lines over chains, whose nodes are all accepted; marks for trees, of which the longest path is."""
    for number, rollback in enumerate(dict.fromkeys(row["rollback"] for row in rows)):
        color = f"C{number}"
        for is_chain in (True, False):
            own = [row for row in rows if row["rollback"] == rollback and row["tree"].startswith("chain") == is_chain]
            nodes = [_num_nodes(row) for row in own]
            rounds = [1e-3 * (row["verify_us"] + row["commit_us"]) for row in own]
            commits = [1e-3 * row["commit_us"] for row in own]
            axes.plot(nodes, rounds, ".-" if is_chain else "D", color=color, label=rollback if is_chain else None)
            axes.plot(nodes, commits, ".--" if is_chain else "D", color=color, fillstyle="none")
    axes.plot([], [], ".--", color="grey", fillstyle="none", label="commit alone")
    axes.plot([], [], "D", color="grey", label="tree that branches")
    ticks = sorted({_num_nodes(row) for row in rows})
    axes.set(xscale="log", yscale="log", xticks=ticks, xticklabels=ticks)
    axes.minorticks_off()


def _num_nodes(row: Row) -> int:
    """The first number in its tree's name: "chain of 15", "63 of topk 4"."""
    return int(re.findall(r"\d+", row["tree"])[0])


def _draw_memory(
    axes: Axes, labels: Sequence[str], sizes: Sequence[tuple[float, float]], hatch: str | None = None
) -> None:
    """Two bars for each label, of bytes resident and at the peak."""
    for number, what in enumerate(("resident", "peak")):
        places = [place + (number - 0.5) * 0.4 for place in range(len(sizes))]
        drawn = axes.barh(places, [1e-9 * own[number] for own in sizes], height=0.38, label=what, hatch=hatch)
        axes.bar_label(drawn, fmt="{:,.2f}", padding=3, fontsize=SMALL)
    axes.set(xscale="log", yticks=range(len(labels)), yticklabels=labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)

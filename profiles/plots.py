"""Plots of what the benchmarks wrote to `results/*.json`, and a page with them.

    python profiles/plots.py [--results profiles/results]

Reads `bench_engine*.json`, `bench_ops*.json`, the three `bench_speculative*.json` and the cache simulation's plot, as
far as they are there; writes SVG files and `README.md` beside them. Each plot names machine, commit and command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from drawing import Record, Row, origin, save
from matplotlib.axes import Axes
from speculative_plots import SECTIONS

TITLE = "# Results"
OURS = "hybrid_runtime"
SIMULATION = "simulate_cache"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    folder: Path = parser.parse_args().results
    sections = [TITLE, "Made by `make plots` from the JSON files here; [the page above](../README.md) explains them."]
    for path in sorted(folder.glob("bench_engine*.json")):
        sections += _engine_section(path, json.loads(path.read_text()))
    for path in sorted(folder.glob("bench_ops*.json")):
        sections += _op_section(path, json.loads(path.read_text()))
    for name, section in SECTIONS.items():
        if (path := folder / f"{name}.json").exists():
            sections += section(path, json.loads(path.read_text()))
    if (folder / f"{SIMULATION}.svg").exists():
        sections += ["## Eviction policies", f"![Cached tokens over state slots]({SIMULATION}.svg)"]
        sections.append(origin(folder / f"{SIMULATION}.json", json.loads((folder / f"{SIMULATION}.json").read_text())))
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def _engine_section(path: Path, record: Record) -> list[str]:
    rows: list[Row] = [*record["figures"]["rows"], *record["figures"]["peers"]]
    section = [f"## Engine, {path.stem}"]
    for name, cases, title, draw in ENGINE_PLOTS:
        chosen = [row for row in rows if row["case"] in cases]
        if chosen:
            file = f"{path.stem}_{name}.svg"
            save(path.with_name(file), title, partial(draw, rows=chosen))
            section.append(f"![{title}]({file})")
    return [*section, origin(path, record)]


def _op_section(path: Path, record: Record) -> list[str]:
    rows: list[Row] = record["figures"]["rows"]
    name = f"{path.stem}.svg"
    title = "Share of the read bandwidth that single operations reach"
    height = 1.5 + 0.28 * len({(row["op"], row["rows"]) for row in rows})
    save(path.with_name(name), title, partial(_draw_ops, rows=rows), height=height)
    return [f"## Operations, {path.stem}", f"![{title}]({name})", origin(path, record)]


def _draw_decode(axes: Axes, rows: Sequence[Row]) -> None:
    """One line per engine, and the floor that moving the bytes sets."""
    for engine in _engines(rows):
        own = [row for row in rows if row["engine"] == engine and "ms_step" in row]
        axes.plot([row["batch"] for row in own], [row["ms_step"] for row in own], marker="o", label=engine)
    bounded = [row for row in rows if "limit_ms" in row]
    batches = [row["batch"] for row in bounded]
    axes.plot(batches, [row["limit_ms"] for row in bounded], color="grey", linestyle="--", label="bandwidth limit")
    axes.set(xscale="log", yscale="log", xlabel="batch", xticks=batches, xticklabels=batches)
    axes.legend()


def _draw_prefill(axes: Axes, rows: Sequence[Row]) -> None:
    _draw_bars(axes, [(f"{row['engine']}, {row['tokens']} tokens", row["tok_s"]) for row in rows])


def _draw_first_token(axes: Axes, rows: Sequence[Row]) -> None:
    """Cold and warm, by case."""
    bars = []
    for row in rows:
        for kind in ("bare", "cold", "second", "warm"):
            if f"ttft_{kind}_s" in row:
                bars.append((f"{row['engine']}, {row['case']} {row['prefix']}, {kind}", 1e3 * row[f"ttft_{kind}_s"]))
    _draw_bars(axes, bars)
    axes.set(xscale="log")


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, float]]) -> None:
    places = range(len(bars))
    colors = ["C0" if label.startswith(OURS) else "C7" for label, _ in bars]
    drawn = axes.barh(places, [value for _, value in bars], color=colors)
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
    axes.set(yticks=places, yticklabels=[label for label, _ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _draw_ops(axes: Axes, rows: Sequence[Row]) -> None:
    cases = list(dict.fromkeys((row["op"], row["rows"]) for row in rows))
    forms = list(dict.fromkeys(row["form"] for row in rows))
    for number, form in enumerate(forms):
        own = [row for row in rows if row["form"] == form]
        places = [cases.index((row["op"], row["rows"])) + (number - 1) * 0.27 for row in own]
        axes.barh(places, [100 * row["share_of_bandwidth"] for row in own], height=0.25, label=form)
    labels = [f"{op}, {count} rows" for op, count in cases]
    axes.set(yticks=range(len(cases)), yticklabels=labels, xlabel="percent")
    axes.invert_yaxis()
    axes.legend()


ENGINE_PLOTS: tuple[tuple[str, tuple[str, ...], str, Callable[..., None]], ...] = (
    ("decode", ("decode",), "Milliseconds per decode step", _draw_decode),
    ("prefill", ("prefill",), "Prefill, tokens per second", _draw_prefill),
    ("first_token", ("shared", "again", "partial"), "Milliseconds to the first token", _draw_first_token),
)


def _engines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["engine"] for row in rows))


if __name__ == "__main__":
    main()

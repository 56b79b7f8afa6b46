"""SVG files of plots, the same for the same figures, and where figures come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "hybrid_runtime"  # the same figures give the same file
mpl.rcParams["svg.fonttype"] = "none"  # text stays text

Record = dict[str, Any]
Row = dict[str, Any]
Draw = Callable[[Axes], None]


def save(path: Path, title: str, draw: Draw, *, height: float = 4.0) -> None:
    figure = _figure(height)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    draw(axes)
    _write(figure, path)


def save_panels(path: Path, title: str, panels: Mapping[str, Draw], *, columns: int, height: float) -> None:
    """Panels by title, row by row, and one legend for all: that of the last."""
    figure = _figure(height)
    figure.suptitle(title)
    for place, (name, draw) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(len(panels) // columns, columns, place)
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.3)
        draw(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    _write(figure, path)


def origin(path: Path, record: Record) -> str:
    return f"`{path.name}`: {record['machine']}, commit {record['commit']}, `{record['command']}`."


def _figure(height: float) -> Figure:
    return Figure(figsize=(8, height), layout="constrained")


def _write(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})

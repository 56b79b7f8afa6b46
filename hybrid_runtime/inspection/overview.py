"""The whole cache at a glance: an SVG in which width is length in tokens and height is a share of the cached tokens."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hybrid_runtime.inspection.picture import Branch, Edge, Picture
from hybrid_runtime.inspection.wording import counted

_WIDTH, _HEIGHT = 1000.0, 220.0  # pixels, of the part without the axis
_AXIS_HEIGHT = 18.0
_MIN_SIDE = 1.0  # what is thinner than a pixel is not drawn
_MIN_HEIGHT_FOR_WORDS = 4.0
_STATE_WIDTH = 3.0
_NUM_TICKS = 5


def overview_svg(picture: Picture) -> str:
    """Bars from left to right along the branches; empty for an empty cache.

    A bar is as tall as its edge's subtree has tokens, and the bars that follow it lie beside it. Blank space beside a
    bar is what ends there. Classes of a bar: `tomb`, `locked`; of the mark at a bar's end: `state`.
    """
    if not picture.totals.num_tokens:
        return ""
    scale_x = _WIDTH / picture.max_length
    scale_y = _HEIGHT / picture.totals.num_tokens
    bars = "".join(_bars(picture.top, 0.0, scale_x, scale_y))
    ticks = "".join(_ticks(picture.max_length, scale_x))
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT + _AXIS_HEIGHT:.0f}" role="img" '
        f'aria-label="Bars of the cached token sequences">{bars}{ticks}</svg>'
    )


def _bars(branch: Branch, y: float, scale_x: float, scale_y: float) -> Iterator[str]:
    for child in (*branch.children, *branch.folded):
        height = child.below.num_tokens * scale_y
        if height >= _MIN_SIDE:
            for edge in child.edges:
                yield _bar(edge, y, scale_x, scale_y)
            yield from _bars(child, y, scale_x, scale_y)
        y += height


def _bar(edge: Edge, y: float, scale_x: float, scale_y: float) -> str:
    width, height = edge.num_tokens * scale_x, edge.below.num_tokens * scale_y
    if width < _MIN_SIDE or height < _MIN_SIDE:
        return ""
    x = edge.start * scale_x
    classes = [name for name, holds in (("tomb", edge.state is None), ("locked", edge.num_kv_locks > 0)) if holds]
    words = f"<title>{_words(edge)}</title>" if height >= _MIN_HEIGHT_FOR_WORDS else ""
    bar = _rect(x, y, width, height, " ".join(classes), words)
    if edge.state is None:
        return bar
    mark = min(_STATE_WIDTH, width)
    return bar + _rect(x + width - mark, y, mark, height, "state", words)


def _rect(x: float, y: float, width: float, height: float, classes: str, words: str) -> str:
    # Half a pixel of gap keeps neighbours apart.
    size = f'width="{max(width - 0.5, 0.5):.1f}" height="{max(height - 0.5, 0.5):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{classes}">{words}</rect>'


def _words(edge: Edge) -> str:
    state = f"state {edge.state.slot} ({edge.state.origin})" if edge.state else "no state"
    figures = f"{edge.start:,} to {edge.length:,}, {state}, {counted(edge.num_hits, 'hit')}"
    return escape(f"{figures}\n{edge.text}", quote=False)


def _ticks(max_length: int, scale_x: float) -> Iterator[str]:
    lengths = sorted({round(max_length * i / _NUM_TICKS) for i in range(_NUM_TICKS + 1)})
    for length in lengths:
        anchor = "start" if length == 0 else "end" if length == max_length else "middle"
        words = "0 tokens" if length == 0 else f"{length:,}"
        yield f'<text x="{length * scale_x:.1f}" y="{_HEIGHT + 14:.0f}" text-anchor="{anchor}">{words}</text>'

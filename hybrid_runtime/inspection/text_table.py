"""The picture as lines of text: figures in columns on the left, the tree with its texts on the right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid_runtime.inspection.picture import Branch, Edge, Picture
from hybrid_runtime.inspection.wording import (
    age_text,
    below_text,
    header_text,
    left_out_text,
    locks_text,
    per_subtree_text,
    state_text,
)


@dataclass(frozen=True)
class _Glyphs:
    state: str
    tombstone: str
    fork: str
    last_fork: str
    past: str
    gap: str
    folded: str


_UNICODE = _Glyphs(state="●", tombstone="○", fork="├╴", last_fork="└╴", past="│ ", gap="…", folded="▸ ")
_ASCII = _Glyphs(state="*", tombstone="o", fork="|-", last_fork="`-", past="| ", gap="...", folded="+ ")

_STYLES = {"state": "green", "hits": "cyan", "locks": "yellow", "used": "dim", "below": "dim"}
_COLUMNS = ("ends", "tokens", "state", "hits", "used", "locks", "below", "text")


def print_picture(picture: Picture, console: Console) -> None:
    """Prints a header, one line for each edge or place where something is left out, and a legend.

    The lines of the tree are cut at the console's width, never wrapped. A console that knows ASCII only gets that.
    """
    is_ascii = console.options.ascii_only
    glyphs = _ASCII if is_ascii else _UNICODE
    console.print(_text(f"Prefix cache: {header_text(picture.totals)}", "bold", is_ascii))
    if not picture.totals.num_nodes:
        return
    has_locks = picture.totals.num_locked_nodes > 0
    columns = [name for name in _COLUMNS if name != "locks" or has_locks]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        # Where there is no room, the text gives way.
        table.add_column(name, justify="left" if name in ("state", "text") else "right", no_wrap=name != "text")
    for line in _lines(picture.top, "", glyphs):
        table.add_row(*(line.cell(name, is_ascii) for name in columns))
    console.print(table)
    console.print(_text(_legend(glyphs, has_locks=has_locks), "dim", is_ascii))


@dataclass(frozen=True)
class _Line:
    cells: Mapping[str, str]
    style: str = ""

    def cell(self, column: str, is_ascii: bool) -> Text:
        text = _text(self.cells.get(column, ""), self.style or _STYLES.get(column, ""), is_ascii)
        text.no_wrap, text.overflow = True, "crop" if is_ascii else "ellipsis"
        return text


def _text(value: str, style: str, is_ascii: bool) -> Text:
    """A `Text`, so that no part of a prompt is read as markup."""
    if is_ascii:
        value = value.replace("…", "...").encode("ascii", "backslashreplace").decode("ascii")
    return Text(value, style=style)


def _lines(branch: Branch, guides: str, glyphs: _Glyphs) -> Iterator[_Line]:
    """What ends `branch`: its children, each with all its lines, then what is left out. `guides` is left of them."""
    for index, child in enumerate(branch.children):
        is_last = index == len(branch.children) - 1 and not branch.has_rest
        beside = guides + ("  " if is_last else glyphs.past)
        fork = guides + (glyphs.last_fork if is_last else glyphs.fork)
        is_folded = not child.children and child.left_out[0] > 0
        for number, edge in enumerate(child.edges):
            mark = glyphs.folded if is_folded and edge is child.edges[-1] else ""
            yield _edge_line(edge, (beside if number else fork) + mark, glyphs)
        yield from _lines(child, beside, glyphs)
    if branch.has_rest:
        words = f"{glyphs.gap} {left_out_text(branch)}"
        yield _Line(
            {"below": per_subtree_text(branch.left_out[1]), "text": guides + glyphs.last_fork + words}, style="dim"
        )


def _edge_line(edge: Edge, guides: str, glyphs: _Glyphs) -> _Line:
    cells = {
        "ends": str(edge.length),
        "tokens": f"+{edge.num_tokens}",
        "state": state_text(edge, glyphs.state, glyphs.tombstone),
        "hits": str(edge.num_hits) if edge.num_hits else "",
        "used": age_text(edge.age),
        "locks": locks_text(edge),
        "below": below_text(edge),
        "text": guides + edge.text,
    }
    return _Line(cells)


def _legend(glyphs: _Glyphs, *, has_locks: bool) -> str:
    meanings = [
        f"{glyphs.state} state slot and origin",
        f"{glyphs.tombstone} tombstone: KV without a state (xN: a chain of N)",
        "ends: tokens from the root",
        "tokens: of this edge",
        "hits: times resumed from",
        "used: how long ago",
        *(["locks: on KV/on the state"] if has_locks else []),
        "below: tokens/states from here down",
        f"{glyphs.folded.strip()} more beneath, not shown",
    ]
    return " · ".join(meanings) if glyphs is _UNICODE else "; ".join(meanings)

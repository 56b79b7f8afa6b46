"""The picture as one HTML page that needs nothing else: an overview, then every edge on a line, in folds."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import partial
from html import escape

from hybrid_runtime.inspection.overview import overview_svg
from hybrid_runtime.inspection.page_style import SCRIPT, STYLE
from hybrid_runtime.inspection.picture import Branch, Edge, Picture, Totals
from hybrid_runtime.inspection.wording import (
    age_text,
    contents_text,
    counted,
    left_out_text,
    locked,
    locks_text,
    per_subtree_text,
    state_text,
)

_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# A second line of defence beside escaping: the page loads nothing and runs no script but its own.
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_SCRIPT_HASH}'"

_COLUMNS = (
    ("", "ends", "tokens from the root to the end of the edge"),
    ("", "tokens", "tokens of the edge"),
    ("s", "state", "state slot and why it was kept, or how many tombstones there are in a row"),
    ("", "hits", "times a request resumed from here"),
    ("", "used", "time since the last use"),
    ("", "locks", "locks on the KV / on the state"),
    ("", "below", "tokens / states from here down, this edge included"),
    ("t", "text", "what the tokens say"),
)
_HEADS = "".join(f'<span class="{classes}" title="{meaning}">{name}</span>' for classes, name, meaning in _COLUMNS)
_CAPTION = (
    "From left to right along the tokens; as tall as the share of all cached tokens that is here and further right. "
    "A green end: a state. Grey: a tombstone. Orange: locked. What is thinner than a pixel is left out."
)
_BUTTONS = '<button id="expand" hidden>Expand all</button> <button id="collapse" hidden>Collapse all</button>'
_LEGEND = "".join(
    f"<span>{words}</span>"
    for words in (
        "● state: its slot, and why it was kept",
        "○ tombstone: KV without a state (xN: a chain of N)",
        "ends: tokens from the root",
        "hits: times resumed from",
        "locks: on the KV / on the state",
        "below: tokens / states from here down",
        "↳ follows the line above without a fork",
        "▸ opens",
    )
)


def html_page(picture: Picture, *, note: str) -> str:
    """The page's text; write it as UTF-8. `note` is a line below the title."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>Prefix cache</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
        f'<h1>Prefix cache</h1>\n<p class="note">{escape(note)}</p>\n',
        _totals(picture.totals),
        *(_contents(picture) if picture.totals.num_nodes else ['<p class="note">Nothing is cached.</p>\n']),
        "</body>\n</html>\n",
    ]
    return "".join(parts)


def _totals(totals: Totals) -> str:
    figures = [
        ("nodes", f"{totals.num_nodes:,}"),
        ("tokens", f"{totals.num_tokens:,}"),
        ("states", f"{totals.num_states:,}"),
        ("tombstones", f"{totals.num_tombstones:,}"),
        ("hits", f"{totals.num_hits:,}"),
        ("locked", contents_text(locked(totals)) if totals.num_locked_nodes else "nothing"),
    ]
    items = "".join(f"<div><dt>{name}</dt><dd>{figure}</dd></div>" for name, figure in figures)
    return f'<dl class="totals">{items}</dl>\n'


def _contents(picture: Picture) -> Iterator[str]:
    yield f"<figure>{overview_svg(picture)}<figcaption>{_CAPTION}</figcaption></figure>\n"
    yield f'<p class="buttons">{_BUTTONS}</p>\n<p class="legend">{_LEGEND}</p>\n<div class="tree">\n'
    yield f'<div class="r head">{_HEADS}</div>\n'
    yield from _rows(picture.top, picture.totals.num_tokens, is_open=True)
    yield f"</div>\n<script>{SCRIPT}</script>\n"


def _rows(branch: Branch, num_all_tokens: int, *, is_open: bool) -> Iterator[str]:
    """What ends `branch`: its children, then a fold of those beyond the budget, then what is not on the page."""
    for child in branch.children:
        yield from _branch(child, num_all_tokens, is_open=is_open)
    has_fold = bool(branch.folded) and branch.has_rest
    depth = branch.depth + 1
    if has_fold:
        yield f"<details>{_rest_row('summary', depth, left_out_text(branch), branch.left_out[1])}\n"
    for child in branch.folded:
        yield from _branch(child, num_all_tokens, is_open=False)
    if branch.num_absent:
        words = f"{counted(branch.num_absent, 'branch', 'branches')} not on this page: {contents_text(branch.absent)}"
        yield _rest_row("div", depth, words, branch.absent) + "\n"
    if has_fold:
        yield "</details>\n"


def _branch(branch: Branch, num_all_tokens: int, *, is_open: bool) -> Iterator[str]:
    """The edges of a branch; the last one is what its children are folded under."""
    is_fold = bool(branch.children or branch.left_out[0])
    for index, edge in enumerate(branch.edges):
        row = partial(_edge_row, edge, branch.depth, num_all_tokens, follows=index > 0)
        if is_fold and edge is branch.edges[-1]:
            yield f"<details{' open' if is_open and branch.children else ''}>{row('summary')}\n"
            yield from _rows(branch, num_all_tokens, is_open=is_open)
            yield "</details>\n"
        else:
            yield row("div") + "\n"


def _edge_row(edge: Edge, depth: int, num_all_tokens: int, tag: str, *, follows: bool) -> str:
    share = 100 * edge.below.num_tokens / num_all_tokens
    cells = [
        _cell("", str(edge.length)),
        _cell("", f"+{edge.num_tokens}"),
        _state_cell(edge),
        _cell("", str(edge.num_hits) if edge.num_hits else ""),
        _cell("u", age_text(edge.age)),
        _cell("l", locks_text(edge)),
        _cell("b", per_subtree_text(edge.below), f"--p:{share:.0f}%" if share >= 1 else ""),
        _cell("t", f"↳ {edge.text}" if follows else edge.text, f"--d:{depth}" if depth else ""),
    ]
    return f'<{tag} class="r">{"".join(cells)}</{tag}>'


def _state_cell(edge: Edge) -> str:
    return _cell("s none" if edge.state is None else "s", state_text(edge, "●", "○"))


def _rest_row(tag: str, depth: int, words: str, totals: Totals) -> str:
    cells = [_cell("b", per_subtree_text(totals)), _cell("t", f"… {words}", f"--d:{depth}")]
    blanks = _cell("", "") * (len(_COLUMNS) - len(cells))
    return f'<{tag} class="r more">{blanks}{"".join(cells)}</{tag}>'


def _cell(classes: str, text: str, style: str = "") -> str:
    attributes = (f' class="{classes}"' if classes else "") + (f' style="{style}"' if style else "")
    return f"<span{attributes}>{escape(text, quote=False)}</span>"

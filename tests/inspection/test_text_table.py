"""The printed tree: everything of a small tree is there, a large one is summed up, and nothing breaks a line."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.inspection.trees import SMALL_ROWS, Planter, big_view, counters, random_planter, small_planter, text_rows


def test_a_small_tree_is_printed_whole():
    printed = small_planter().view().to_text()
    assert printed.splitlines()[0] == (
        "Prefix cache: 7 nodes, 19 tokens, 4 states, 3 tombstones; 5 hits; locked: 2 nodes, 11 tokens, 1 state"
    )
    rows = text_rows(printed)
    names = ("ends", "tokens", "state", "hits", "used", "locks")
    shown = {row.text.lstrip("├╴└│ ").strip('"'): [row.cells[name] for name in names] for row in rows}
    assert list(shown.items()) == [(text, cells[:-1]) for text, cells in SMALL_ROWS.items()]
    # Of an edge that nothing follows, the sum is the edge itself, and left out.
    assert [row.cells["below"] for row in rows] == ["15/3", "", "4/2", "", "4/1", ""]


def test_the_guides_show_what_branches_off_where():
    texts = [row.text for row in text_rows(small_planter().view().to_text())]
    assert texts == ['├╴"system: "', '│ ├╴"add"', '│ └╴"sub"', '│   "\\n"', '└╴"els"', '  "e"']


def test_what_is_left_out_is_marked_or_summed_up():
    planter = small_planter()
    lines = {count: [row.text for row in text_rows(planter.view().to_text(max_lines=count))] for count in (1, 2, 4)}
    assert lines[1] == ["└╴… 2 more branches: 7 nodes, 19 tokens, 4 states"]
    assert lines[2] == ['├╴▸ "system: "', '└╴▸ "els"']
    assert lines[4] == ['├╴"system: "', '│ ├╴"add"', '│ └╴▸ "sub"', '└╴▸ "els"']
    planter.plant("system: mul")
    fewer = [row.text for row in text_rows(planter.view().to_text(max_lines=4))]
    rest = "… 2 more branches: 3 nodes, 7 tokens, 3 states"
    assert fewer == ['├╴"system: "', '│ ├╴"add"', f"│ └╴{rest}", '└╴▸ "els"']
    shallow = [row.text for row in text_rows(planter.view().to_text(max_depth=1))]
    assert shallow == ['├╴▸ "system: "', '└╴"els"', '  "e"']


def test_without_locks_there_is_no_column_for_them():
    planter = Planter()
    planter.plant("abc")
    printed = planter.view().to_text()
    assert "nothing locked" in printed
    assert "locks" not in printed
    assert "locks" in small_planter().view().to_text()


def test_an_empty_cache_is_said_to_be_empty():
    assert Planter().view().to_text() == "Prefix cache: empty\n"


@given(seed=st.integers(0, 10**6), num_sequences=st.integers(0, 30), max_lines=st.integers(1, 30))
def test_the_printed_sums_add_up_to_the_trees_counters(seed, num_sequences, max_lines):
    cache = (planter := random_planter(seed, num_sequences)).cache
    rows = text_rows(planter.view().to_text(width=200, max_lines=max_lines, max_depth=4))
    assert len(rows) <= max_lines
    num_tokens = num_states = 0
    for row in rows:
        # Where a line stands for more than itself, its sum counts, which has the line itself in it.
        if "▸" in row.text or "… " in row.text:
            tokens, states = map(int, row.cells["below"].split("/"))
        else:
            tokens, states = int(row.cells["tokens"]), int(row.cells["state"].startswith("●"))
        num_tokens += tokens
        num_states += states
    expected = counters(cache)
    assert (num_tokens, num_states) == (expected.num_tokens, expected.num_states)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_ten_thousand_nodes_take_a_hundred_lines(width):
    view = big_view()
    assert view.num_nodes >= 10_000
    printed = view.to_text(width=width)
    lines = printed.splitlines()
    assert 95 <= len(lines) - len(view.to_text(width=width, max_lines=1).splitlines()) + 1 <= 100
    assert max(map(len, lines)) <= width
    if width >= 80:
        rows = text_rows(printed)
        assert 95 <= len(rows) <= 100
        assert sum("▸" in row.text for row in rows) >= 10
        assert sum("more branch" in row.text for row in rows) >= 10


NASTY = [
    "[red]not red[/red] [/] [bold",
    "\x1b[2J\x1b]0;title\x07\r\x08\x9b31m",
    "\u202eright to left\u202c \u2066x",
    "line\nbreaks\r\nof\x0ball\x0c\x85kinds\u2028and\u2029more",
    "<script>alert(1)</script><!-- ]]> ' \" -->",
    "\ud800 lone, \ufffe none",
    "e\u0301\u0301\u0301 狐狸🚀" * 9,
]


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("force_terminal", [False, True])
def test_no_prompt_breaks_the_terminal(text, force_terminal):
    planter = Planter()
    planter.plant(text)
    stream = io.StringIO()
    planter.view().render(console=Console(file=stream, width=120, force_terminal=force_terminal))
    printed = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()) if force_terminal else stream.getvalue()
    assert all(char.isprintable() or char == "\n" for char in printed)
    planter = Planter()
    planter.plant("plain" * 100)
    assert printed.count("\n") == planter.view().to_text(width=120).count("\n")
    printed.encode()


def test_markup_is_printed_as_it_is():
    planter = Planter()
    planter.plant(NASTY[0])
    assert f'"{NASTY[0]}"' in planter.view().to_text()


def test_a_console_that_knows_ascii_only_gets_nothing_else():
    planter = small_planter()
    planter.plant("狐狸\n")
    planter.plant("system: mul")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    planter.view().render(max_lines=5, console=Console(file=stream, width=100))
    stream.flush()
    lines = [line.rstrip() for line in raw.getvalue().decode("ascii").splitlines()]
    lines = lines[lines.index("ends tokens state    hits used locks below text") + 1 :]
    assert lines[0].endswith('|-"system: "')
    assert "* 7 tail" in lines[1]
    assert lines[2].endswith("| `-... 2 more branches: 3 nodes, 7 tokens, 3 states")
    assert lines[3].endswith(r'|-"\u72d0\u72f8\n"')
    assert lines[4].endswith('`-+ "els"')
    assert lines[5].startswith("* state slot and origin;")

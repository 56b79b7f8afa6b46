"""The page: well-formed, self-contained, complete within its limits, and no prompt becomes part of its markup."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.inspection.html_page import html_page
from hybrid_runtime.inspection.labels import EdgeLabels
from hybrid_runtime.inspection.survey import Limits, take_picture
from tests.inspection.test_text_table import NASTY
from tests.inspection.trees import (
    SMALL_ROWS,
    CharTokenizer,
    Page,
    Planter,
    big_planter,
    big_view,
    counters,
    random_planter,
    small_planter,
)


def test_a_small_tree_is_on_the_page_whole():
    page = Page(small_planter().view().to_html())
    shown = {cells[-1].removeprefix("↳ ").strip('"'): cells[:-1] for cells in page.rows}
    assert list(shown.items()) == list(SMALL_ROWS.items())
    assert [cells[-1][0] == "↳" for cells in page.rows] == [False, False, False, True, False, True]
    totals = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", small_planter().view().to_html())
    assert dict(totals) == {
        "nodes": "7",
        "tokens": "19",
        "states": "4",
        "tombstones": "3",
        "hits": "5",
        "locked": "2 nodes, 11 tokens, 1 state",
    }


def test_the_overview_has_a_bar_for_each_edge_and_a_mark_for_each_state():
    page = Page(small_planter().view().to_html())
    classes = [attributes["class"] for tag, attributes in page.tags if tag == "rect"]
    assert sorted(filter(None, classes)) == ["locked", *["state"] * 4, "tomb", "tomb locked"]
    assert len(classes) == 6 + 4


def test_the_page_needs_nothing_but_itself():
    source = small_planter().view().to_html()
    page = Page(source)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [attributes for _, attributes in page.tags if {"src", "href", "srcset"} & attributes.keys()]
    assert not re.search(r"https?:|url\(|@import", source)
    assert "default-src 'none'" in source


def test_an_empty_cache_has_a_page():
    page = Page(Planter().view().to_html())
    assert page.rows == []
    assert "Nothing is cached." in page.text


@given(seed=st.integers(0, 10**6), num_sequences=st.integers(1, 30), max_lines=st.integers(1, 30))
def test_everything_is_on_the_page_and_only_as_much_open_as_was_asked_for(seed, num_sequences, max_lines):
    planter = random_planter(seed, num_sequences)
    page = Page(planter.view().to_html(max_lines=max_lines, max_depth=4))
    edges = [cells for cells in page.rows if cells[1]]
    expected = counters(planter.cache)
    assert sum(int(cells[1]) for cells in edges) == expected.num_tokens
    assert sum(cells[2].startswith("●") for cells in edges) == expected.num_states
    assert sum(int(cells[3] or 0) for cells in edges) == expected.num_hits
    assert page.num_open_rows <= max_lines


def test_what_is_beyond_the_limits_of_the_page_is_summed_up():
    planter = big_planter(500)
    label, limits = EdgeLabels(CharTokenizer()), Limits(max_lines=20, max_depth=3, max_folded=50)
    page = Page(html_page(take_picture(planter.cache, limits, label=label, now=0.0), note=""))
    sums = [re.search(r"not on this page: ([\d,]+) nodes?, ([\d,]+) tokens?", cells[-1]) for cells in page.rows]
    num_tokens_absent = sum(int(match[2].replace(",", "")) for match in sums if match)
    num_tokens_there = sum(int(cells[1]) for cells in page.rows if cells[1])
    assert num_tokens_absent > 0
    assert num_tokens_there + num_tokens_absent == planter.cache.num_kv_slots


def test_ten_thousand_nodes_make_a_page_that_a_browser_can_hold():
    source = big_view().to_html()
    page = Page(source)
    assert len(page.rows) >= 8_000
    assert page.num_open_rows <= 100
    assert page.num_open_folds_in_closed == 0  # opening one shows what is next, not all there is
    assert page.max_nesting < 256
    assert len(source) < 6_000_000


def test_a_deep_tree_is_not_nested_deeply_on_the_page():
    planter = Planter()
    planter.plant([7] * 3000, dict.fromkeys(range(1, 3001), "track"))
    for length in range(600):
        planter.plant([5] * length + [6])
    page = Page(planter.view(None).to_html())
    assert page.max_nesting < 256
    assert len(page.rows) > 3000


@pytest.mark.parametrize("text", NASTY)
def test_no_prompt_becomes_markup(text):
    plain, nasty = Planter(), Planter()
    plain.plant("x" * len(text))
    nasty.plant(text)
    pages = [Page(planter.view().to_html()) for planter in (plain, nasty)]
    tags = [[tag for tag, _ in page.tags] for page in pages]
    assert tags[0] == tags[1]
    nasty.view().to_html().encode()
    (row,) = pages[1].rows
    assert row[-1] == EdgeLabels(CharTokenizer())(next(nasty.cache.nodes()).key)


@pytest.mark.parametrize("origin", ["<img src=x onerror=alert(1)>", '"><script>'])
def test_an_origin_does_not_become_markup_either(origin):
    planter = Planter()
    planter.plant("abc", {3: origin})
    page = Page(planter.view().to_html())
    assert page.rows[0][2] == f"● 1 {origin}"
    assert [tag for tag, _ in page.tags].count("script") == 1

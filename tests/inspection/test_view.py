"""`rt.prefix_cache`: always the present cache, read-only, and drawn on demand."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.inspection.view import PrefixCacheView
from tests.cache.helpers import ints
from tests.engine.helpers import greedy, random_tokens, runtime_of
from tests.inspection.trees import Page, Planter, small_planter, text_rows
from tests.unit import byte_bpe


def snapshot(cache: RadixCache) -> list[object]:
    """All that a node says, and the order in which things would be evicted."""
    nodes = [
        (node.key.tolist(), node.kv_slots.tolist(), list(node.children), node.state_slot, node.kv_lock, node.state_lock)
        for node in cache.nodes()
    ]
    uses = [(node.num_hits, node.last_used) for node in cache.nodes()]
    return [nodes, uses, *([id(node) for node in order] for order in (cache._tree.kv_order, cache._tree.state_order))]


def test_looking_changes_nothing(tmp_path):
    planter = small_planter()
    before = snapshot(planter.cache)
    view = planter.view()
    view.render(tmp_path / "page.html", max_lines=3, console=Console(file=io.StringIO()))
    view.match(ints(map(ord, "system: add!")))
    view.check()
    repr(view)
    assert snapshot(planter.cache) == before


def test_the_view_says_what_the_cache_says():
    planter = small_planter()
    cache, view = planter.cache, planter.view()
    for name in (
        "num_nodes",
        "num_kv_slots",
        "num_evictable_kv",
        "num_protected_kv",
        "num_state_slots",
        "num_evictable_states",
        "num_protected_states",
    ):
        assert getattr(view, name) == getattr(cache, name)
        with pytest.raises(AttributeError):
            setattr(view, name, 0)
    assert list(view.nodes()) == list(cache.nodes())
    assert np.array_equal(view.owned_kv_slots(), cache.owned_kv_slots())
    assert np.array_equal(view.owned_state_slots(), cache.owned_state_slots())
    match = view.match(ints(map(ord, "system: add!")))
    assert (match.state_length, match.state_slot) == (11, 7)
    assert "".join(map(chr, view.path_tokens(match.node))) == "system: add"


def test_the_view_has_no_way_to_change_the_cache():
    public = {name for name in dir(PrefixCacheView) if not name.startswith("_")}
    assert not public & {
        "insert",
        "lock",
        "lock_kv",
        "unlock",
        "evict_kv",
        "evict_state",
        "reset",
        "emptied",
        "on_evict",
    }


def test_the_view_follows_a_cache_that_is_replaced():
    caches = [small_planter().cache]
    view = PrefixCacheView(lambda: caches[-1], None)
    assert view.num_nodes == 7
    caches.append(Planter().cache)
    assert view.num_nodes == 0
    assert view.to_text() == "Prefix cache: empty\n"


def test_render_prints_what_to_text_gives_and_writes_what_to_html_gives(tmp_path, capsys):
    view = small_planter().view()
    stream = io.StringIO()
    view.render(console=Console(file=stream, width=100))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == view.to_text(width=100).splitlines()
    assert list(tmp_path.iterdir()) == []
    view.render(str(tmp_path / "page.html"), max_lines=4)
    assert "Prefix cache: 7 nodes" in capsys.readouterr().out
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert Page(written).rows == Page(view.to_html(max_lines=4)).rows


@pytest.mark.parametrize("limit", ["max_lines", "max_depth"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_a_wrong_limit_is_refused_before_anything_is_written(limit, value, tmp_path, capsys):
    view = small_planter().view()
    with pytest.raises(ValueError, match=rf"{limit} must be an integer of at least 1, got {value}"):
        view.render(tmp_path / "page.html", **{limit: value})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        small_planter().view().render(tmp_path / "no such folder" / "page.html")


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_a_runtime_shows_its_cache(with_tokenizer):
    rng = np.random.default_rng(0)
    prompt = random_tokens(rng, 20)
    with runtime_of("mamba2", **({"tokenizer": byte_bpe.tokenizer()} if with_tokenizer else {})) as rt:
        cache = rt.prefix_cache
        assert cache.to_text() == "Prefix cache: empty\n"
        rt.generate(prompt, greedy(4))
        rt.generate(prompt, greedy(4))
        rows = text_rows(cache.to_text())
        assert sum(int(row.cells["tokens"]) for row in rows) == cache.num_kv_slots
        assert rows[0].cells["state"].endswith(" tail")
        assert rows[0].cells["hits"] == "1"
        assert rows[0].cells["ends"] == "19"
        assert rows[0].text.removeprefix("└╴").startswith('"' if with_tokenizer else f"[{prompt[0]}, {prompt[1]}, ")
        rt.reset_prefix_cache()
        assert cache.num_nodes == 0

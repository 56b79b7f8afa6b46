"""Prefix caches built by hand, a tokenizer whose tokens are characters, and readers of the two outputs."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser

from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.inspection.picture import Branch, Edge, Picture, Totals
from hybrid_runtime.inspection.view import PrefixCacheView
from tests.cache.helpers import checkpoint, ints


class CharTokenizer:
    """Token n is the character of code point n."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, token_ids))


class Planter:
    """A cache to insert sequences into, each token and state in a slot of its own."""

    def __init__(self) -> None:
        self.cache = RadixCache("lru")
        self._next_kv = 1
        self._next_state = 1

    def plant(self, text: str | Iterable[int], states: dict[int, str] | None = None) -> Node:
        """Inserts a sequence with states at some lengths, by default at its end; returns its last node."""
        tokens = ints(map(ord, text) if isinstance(text, str) else text)
        kv_slots = ints(range(self._next_kv, self._next_kv + len(tokens)))
        self._next_kv += len(tokens)
        checkpoints = []
        for length, origin in (states or {len(tokens): "tail"}).items():
            checkpoints.append(checkpoint(length, self._next_state, origin))
            self._next_state += 1
        return self.cache.insert(tokens, kv_slots, checkpoints).node

    def hit(self, node: Node, times: int = 1) -> None:
        for _ in range(times):
            self.cache.unlock(self.cache.lock(node))

    def view(self, tokenizer: object = CharTokenizer()) -> PrefixCacheView:
        return PrefixCacheView(lambda: self.cache, tokenizer)  # type: ignore[arg-type]  # some tests pass a broken one


def small_planter() -> Planter:
    """A shared beginning with hits and locks and without its state, a locked branch, and a chain of tombstones."""
    planter = Planter()
    shared = planter.plant("system: ", {8: "junction"})
    planter.hit(shared, 4)
    planter.plant("else", {2: "hint", 3: "hint", 4: "final"})
    planter.plant("system: sub\n", {11: "tail", 12: "final"})
    locked = planter.plant("system: add", {11: "tail"})
    planter.cache.lock(locked)
    planter.cache.lock_kv(locked)
    planter.cache.lock_kv(shared)
    for node in planter.cache.nodes():
        if node.origin == "hint":
            node.last_used -= 7200
    planter.cache.evict_state(3)  # the oldest: of the shared beginning and the two hints
    return planter


SMALL_ROWS = {
    # ends, tokens, state, hits, used, locks, below
    "system: ": ["8", "+8", "○", "4", "now", "3/0", "15/3"],
    "add": ["11", "+3", "● 7 tail", "1", "now", "2/1", "3/1"],
    "sub": ["11", "+3", "● 5 tail", "", "now", "", "4/2"],
    r"\n": ["12", "+1", "● 6 final", "", "now", "", "1/1"],
    "els": ["3", "+3", "○ x2", "", "2h", "", "4/1"],
    "e": ["4", "+1", "● 4 final", "", "now", "", "1/1"],
}
"""What both outputs show of `small_planter()`, in this order."""


def random_planter(seed: int, num_sequences: int, alphabet: int = 4, max_length: int = 30) -> Planter:
    """Random sequences, hits, locks that are held, and evictions."""
    rng, planter = random.Random(seed), Planter()
    for _ in range(num_sequences):
        tokens = [rng.randrange(97, 97 + alphabet) for _ in range(rng.randint(1, max_length))]
        lengths = {len(tokens), *(rng.randint(1, len(tokens)) for _ in range(rng.randrange(3)))}
        planter.plant(tokens, {length: rng.choice(["tail", "junction", "final"]) for length in sorted(lengths)})
        node = planter.cache.match(ints([*tokens, 0])).node
        action = rng.random()
        if action < 0.2:
            planter.hit(node, rng.randint(1, 3))
        elif action < 0.3:
            for _ in range(rng.randint(1, 2)):
                planter.cache.lock(node)
        elif action < 0.35:
            planter.cache.lock_kv(node)
        elif action < 0.6:
            planter.cache.evict_state(rng.randint(1, 3))
    planter.cache.check()
    return planter


def big_planter(num_nodes: int, seed: int = 0) -> Planter:
    """A tree of that many nodes or few more, like that of many conversations with few beginnings."""
    rng, planter = random.Random(seed), Planter()
    sequences: list[list[int]] = [[rng.randrange(97, 123) for _ in range(60)] for _ in range(12)]
    while planter.cache.num_nodes < num_nodes:
        base = sequences[min(int(rng.paretovariate(0.3)), len(sequences)) - 1]
        tokens = base[: rng.randint(40, len(base))] + [rng.randrange(97, 123) for _ in range(rng.randint(5, 60))]
        planter.plant(tokens, {len(tokens) - 1: "tail", len(tokens): "final"})
        if len(tokens) < 400:
            sequences.append(tokens)
        if planter.cache.num_nodes % 3 == 0:
            planter.cache.evict_state(1)
    return planter


@functools.cache
def big_view() -> PrefixCacheView:
    """Ten thousand nodes; shared by all tests."""
    return big_planter(10_000).view()


def counters(cache: RadixCache) -> Totals:
    """What the tree itself counts, and for what it does not, a count of its nodes."""
    nodes = list(cache.nodes())
    return Totals(
        num_nodes=cache.num_nodes,
        num_tokens=cache.num_kv_slots,
        num_states=cache.num_state_slots,
        num_hits=sum(node.num_hits for node in nodes),
        num_locked_nodes=sum(node.kv_lock > 0 for node in nodes),
        num_locked_tokens=cache.num_protected_kv,
        num_locked_states=cache.num_protected_states,
    )


def branches(picture: Picture) -> Iterator[Branch]:
    pending = [picture.top]
    while pending:
        branch = pending.pop()
        yield branch
        pending += [*branch.children, *branch.folded]


def edges(picture: Picture) -> list[Edge]:
    return [edge for branch in branches(picture) for edge in branch.edges]


# Readers of the outputs.


@dataclass(frozen=True)
class TextRow:
    """One line of the printed tree; `cells` by the name of the column."""

    cells: dict[str, str]
    text: str


def text_rows(printed: str) -> list[TextRow]:
    """The lines between header and legend. Figures end where their column's name ends; states begin where it does."""
    lines = printed.splitlines()
    if lines == ["Prefix cache: empty"]:
        return []
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("ends "))
    end = next(i for i, line in enumerate(lines) if line.startswith("● state slot"))
    head = lines[start]
    ends = {m[0]: m.end() for m in re.finditer(r"\S+", head)}
    state_at, text_at = head.index("state"), head.index("text")
    rows = []
    for line in lines[start + 1 : end]:
        cells = {}
        for name, right in ends.items():
            if name not in ("state", "text"):
                match = re.search(r"\S+$", line[:right].ljust(right))
                cells[name] = match[0] if match else ""
        cells["state"] = re.split(r"  ", line[state_at:text_at])[0].strip()
        rows.append(TextRow(cells, line[text_at:]))
    return rows


class Page(HTMLParser):
    """Reads a page: checks that tags are balanced, and gathers the rows of the tree as lists of cells."""

    VOID = frozenset({"meta"})

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.max_nesting = 0
        self.num_open_rows = 0
        self.num_open_folds_in_closed = 0
        self._closed_folds = 0
        self.feed(source)
        self.close()
        assert self.stack == [], "unclosed tags"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.VOID:
            return
        classes = (dict(attrs).get("class") or "").split()
        is_row = "r" in classes and "head" not in classes
        # A fold that is closed hides all but its summary.
        if tag == "details":
            is_open = "open" in dict(attrs)
            self.num_open_folds_in_closed += is_open and self._closed_folds > 0
            self._closed_folds += not is_open
        self.stack.append((tag, "row" if is_row else "open" if "open" in dict(attrs) else ""))
        self.max_nesting = max(self.max_nesting, len(self.stack))
        if is_row:
            self.rows.append([])
            self.num_open_rows += self._closed_folds - (tag == "summary" and self.stack[-2][1] != "open") == 0
        elif tag == "span" and self._in_row():
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        opened, mark = self.stack.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        self._closed_folds -= tag == "details" and mark != "open"

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1][0] == "span" and self._in_row():
            self.rows[-1][-1] += data
        self.texts.append(data)

    def _in_row(self) -> bool:
        return any(mark == "row" for _, mark in self.stack)

    @property
    def text(self) -> str:
        return "".join(self.texts)

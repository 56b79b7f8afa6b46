"""`PrefixCacheView`: the prefix cache as its users see it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path

from rich.console import Console

from hybrid_runtime.cache.node import Node, TokenArray
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import PrefixMatch
from hybrid_runtime.inspection.html_page import html_page
from hybrid_runtime.inspection.labels import EdgeLabels
from hybrid_runtime.inspection.picture import Picture
from hybrid_runtime.inspection.survey import Limits, take_picture
from hybrid_runtime.inspection.text_table import print_picture
from hybrid_runtime.memory.slots import SlotArray
from hybrid_runtime.text.detokenizer import TokenDecoder

_MAX_FOLDED = 20_000  # edges on a page beyond those it shows at once: some 10 MB


class PrefixCacheView:
    """What is in the prefix cache, to look at and not to change.

    Always shows the cache as it is now. Matches and nodes are valid until the runtime runs its next step.
    """

    def __init__(self, cache: Callable[[], RadixCache], tokenizer: TokenDecoder | None) -> None:
        """`cache` gives the runtime's present cache: a fresh start after an error replaces it."""
        self._cache = cache
        self._labels = EdgeLabels(tokenizer)

    # The picture.

    def render(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_lines: int = 100,
        max_depth: int = 12,
        console: Console | None = None,
    ) -> None:
        """Prints the tree as text; where `path` is given, also writes it there as an HTML page that needs no network.

        The most useful branches come first: by hits, then recency, then tokens. The text has at most `max_lines` lines
        between header and legend, none below more than `max_depth` forks; what is left out is summed up. The page has
        the same lines open and the rest folded. `console`: a `rich` console to print on, by default standard output.

        Raises ValueError for a limit below 1 and for a path that does not end in .html, OSError if the page cannot be
        written.
        """
        limits = _limits(max_lines, max_depth)
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ValueError(f"path must be a path or None, not {path!r}")
        if path is not None and Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"path must end in .html, as the page is HTML, not {os.fspath(path)!r}")
        if path is not None:
            Path(path).write_text(self.to_html(max_lines=max_lines, max_depth=max_depth), encoding="utf-8")
        print_picture(self._picture(limits), Console() if console is None else console)

    def to_text(self, *, width: int = 120, max_lines: int = 100, max_depth: int = 12) -> str:
        """What `render` prints, as plain text of `width` columns."""
        stream = StringIO()
        console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
        print_picture(self._picture(_limits(max_lines, max_depth)), console)
        return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())

    def to_html(self, *, max_lines: int = 100, max_depth: int = 12) -> str:
        """What `render` writes to a file."""
        picture = self._picture(_limits(max_lines, max_depth, max_folded=_MAX_FOLDED))
        return html_page(picture, note=f"as of {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}")

    def _picture(self, limits: Limits) -> Picture:
        return take_picture(self._cache(), limits, label=self._labels, now=time.monotonic())

    def __repr__(self) -> str:
        return (
            f"PrefixCacheView({self.num_nodes} nodes, {self.num_kv_slots} KV slots, {self.num_state_slots} state slots;"
            " render() shows them)"
        )

    # Contents.

    def match(self, tokens: TokenArray) -> PrefixMatch:
        """Deepest cached prefix of `tokens[:-1]` (int32 `[L]`) that can be resumed from, as of now. Changes nothing."""
        return self._cache().match(tokens)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        return self._cache().nodes()

    def path_tokens(self, node: Node) -> TokenArray:
        """All tokens from the root to the node's end, int32 `[node.length]`, a copy."""
        return self._cache().path_tokens(node)

    def owned_kv_slots(self) -> SlotArray:
        """All KV slots in the tree, int32, in no particular order."""
        return self._cache().owned_kv_slots()

    def owned_state_slots(self) -> SlotArray:
        """All state slots in the tree, int32, in no particular order."""
        return self._cache().owned_state_slots()

    def check(self) -> None:
        """Asserts every invariant of the tree by recomputing it."""
        self._cache().check()

    # Counters.

    @property
    def num_nodes(self) -> int:
        """Nodes without the root."""
        return self._cache().num_nodes

    @property
    def num_kv_slots(self) -> int:
        """Cached tokens."""
        return self._cache().num_kv_slots

    @property
    def num_evictable_kv(self) -> int:
        return self._cache().num_evictable_kv

    @property
    def num_protected_kv(self) -> int:
        """KV slots under a lock."""
        return self._cache().num_protected_kv

    @property
    def num_state_slots(self) -> int:
        """Checkpoints."""
        return self._cache().num_state_slots

    @property
    def num_evictable_states(self) -> int:
        return self._cache().num_evictable_states

    @property
    def num_protected_states(self) -> int:
        """States under a lock."""
        return self._cache().num_protected_states


def _limits(max_lines: int, max_depth: int, max_folded: int = 0) -> Limits:
    for name, value in (("max_lines", max_lines), ("max_depth", max_depth)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return Limits(max_lines, max_depth, max_folded)

"""A drafter that knows what follows, and drafts it rightly, wrongly or partly, as its seed has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_runtime.speculative.draft import Draft, DraftRow

CHAIN, TREE = "chain", "tree"
RIGHT, WRONG, PARTLY, TWINS, EMPTY = "right", "wrong", "partly", "twins", "empty"
KINDS = (RIGHT, WRONG, PARTLY, PARTLY, TWINS, EMPTY)


class ScriptedDrafter:
    """Drafts of all kinds around known texts; every draft fills its row's `max_nodes`, or has a random size below.

    "right" continues the text and, where that ends, goes on at random, as deep as the nodes reach; "wrong" has no node
    that the target accepts; "partly" has both, and more than one node with the right token below one parent; "twins"
    has each node twice below its parent. A row whose tokens begin none of the texts gets random tokens.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        shape: str = TREE,
        kinds: Sequence[str] = KINDS,
        num_tokens: int = 100,
    ) -> None:
        """`texts`: prompts with their outputs. Random tokens are below `num_tokens`."""
        self._texts = [list(map(int, text)) for text in texts]
        self._rng = np.random.default_rng(seed)
        self._shape = shape
        self._kinds = tuple(kinds)
        self._num_tokens = num_tokens
        self.asked: list[tuple[int, int, int]] = []  # row, number of tokens and `max_nodes` of all it was asked for

    def learn(self, text: Sequence[int]) -> None:
        """One more text to draft from."""
        self._texts.append(list(map(int, text)))

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.asked += [(row.row, len(row.tokens), row.max_nodes) for row in rows]
        return [self._draft(self._continuation(row.tokens.tolist()), row.max_nodes) for row in rows]

    def _continuation(self, tokens: list[int]) -> list[int]:
        matching = [text[len(tokens) :] for text in self._texts if text[: len(tokens)] == tokens]
        return max(matching, key=len, default=[])

    def _draft(self, truth: list[int], max_nodes: int) -> Draft:
        kind = self._kinds[int(self._rng.integers(len(self._kinds)))]
        if kind == EMPTY or max_nodes <= 0:
            return Draft.chain([])
        size = max_nodes if self._rng.random() < 0.5 else int(self._rng.integers(1, max_nodes + 1))
        parents = self._parents(size, kind)
        depths, is_right = [0], [True]
        tokens: list[int] = []
        for node, parent in enumerate(parents, start=1):
            depth = depths[parent]
            if kind == TWINS and node % 2 == 0 and parent == parents[node - 2]:
                token = tokens[-1]
            else:
                token = self._token(truth[depth] if depth < len(truth) else None, kind)
            tokens.append(token)
            depths.append(depth + 1)
            is_right.append(is_right[parent] and depth < len(truth) and token == truth[depth])
        return Draft(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32))

    def _parents(self, size: int, kind: str) -> list[int]:
        if self._shape == CHAIN or kind == RIGHT:
            return list(range(size))
        if kind == TWINS:
            return [max(0, (node - 1) // 2 * 2 - 1) for node in range(1, size + 1)]  # pairs, each below a first one
        return [int(self._rng.integers(0, node)) for node in range(1, size + 1)]

    def _token(self, right: int | None, kind: str) -> int:
        if right is not None and (kind in (RIGHT, TWINS) or (kind == PARTLY and self._rng.random() < 0.7)):
            return right
        token = int(self._rng.integers(0, self._num_tokens))
        return (token + 1) % self._num_tokens if token == right else token

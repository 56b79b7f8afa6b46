"""Acceptance against a walk from the root, and against plain decoding of the same draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_runtime.ops.accept import accept_path
from tests.ops.tree_cases import Parents, build_tree, small_parents


@dataclass(frozen=True)
class Verdict:
    parents: list[Parents]
    token_ids: list[list[int]]
    num_nodes: list[int]
    chosen: list[list[int]]
    max_accepted: list[int]

    def accept(self) -> list[list[int]]:
        """The accepted nodes of each row; checks that zeros lie behind them."""
        token_ids_BT, num_nodes_B, chosen_BT, max_accepted_B = (
            torch.tensor(values) for values in (self.token_ids, self.num_nodes, self.chosen, self.max_accepted)
        )
        tree = build_tree(self.parents)
        path = accept_path(token_ids_BT, num_nodes_B, chosen_BT, tree, max_accepted_B)
        assert path.nodes_BT.dtype == path.num_nodes_B.dtype == torch.int64
        assert path.nodes_BT.shape == token_ids_BT.shape
        rows = list(zip(path.nodes_BT.tolist(), path.num_nodes_B.tolist(), strict=True))
        assert not any(any(nodes[count:]) for nodes, count in rows)
        return [nodes[:count] for nodes, count in rows]


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Two or three tokens, so that drafts often hit and siblings are often equal; the last nodes of a row are filler."""
    parents = draw(small_parents(max_nodes=12))
    num_rows, num_nodes = len(parents), len(parents[0])
    tokens = st.lists(st.integers(0, draw(st.integers(0, 2))), min_size=num_nodes, max_size=num_nodes)
    real = [draw(st.integers(0, num_nodes)) for _ in parents]
    for own, count in zip(parents, real, strict=True):
        own[count:] = [0] * (num_nodes - count)
    return Verdict(
        parents,
        [draw(tokens) for _ in parents],
        real,
        [draw(tokens) for _ in parents],
        [draw(st.integers(1, num_nodes + 1)) for _ in range(num_rows)],
    )


def walk(parents: Parents, token_ids: list[int], num_nodes: int, chosen: list[int], max_accepted: int) -> list[int]:
    path = [0] if num_nodes else []
    while path and len(path) < max_accepted:
        children = [node for node in range(1, num_nodes) if parents[node] == path[-1]]
        hits = [node for node in children if token_ids[node] == chosen[path[-1]]]
        if not hits:
            break
        path.append(hits[0])
    return path


@given(verdicts())
@settings(max_examples=300)
def test_acceptance_is_the_walk_from_the_root(verdict: Verdict):
    rows = zip(verdict.parents, verdict.token_ids, verdict.num_nodes, verdict.chosen, verdict.max_accepted, strict=True)
    assert verdict.accept() == [walk(*row) for row in rows]


@given(verdicts(), st.integers(0, 10))
def test_accepted_tokens_are_what_plain_decoding_draws(verdict: Verdict, salt: int):
    """A draw is a function of the text so far: the accepted tokens and the draw behind the last are its next tokens."""

    def draw(text: tuple[int, ...]) -> int:
        return hash((salt, *text)) % 3

    def text_of(row: int, node: int) -> tuple[int, ...]:
        parent = verdict.parents[row][node]
        before = text_of(row, parent) if node else ()
        return (*before, verdict.token_ids[row][node])

    chosen = [[draw(text_of(row, node)) for node in range(len(own))] for row, own in enumerate(verdict.parents)]
    drawn = Verdict(verdict.parents, verdict.token_ids, verdict.num_nodes, chosen, verdict.max_accepted)
    for row, path in enumerate(drawn.accept()):
        text: tuple[int, ...] = (verdict.token_ids[row][0],)
        for node in path:
            assert verdict.token_ids[row][node] == text[-1]
            text = (*text, draw(text))
        assert not path or chosen[row][path[-1]] == text[-1]


def test_a_long_chain_is_accepted_to_the_end():
    chain = [[0, *range(63)]]
    tokens = [list(range(64))]
    assert Verdict(chain, tokens, [64], [list(range(1, 65))], [64]).accept() == [list(range(64))]
    assert Verdict(chain, tokens, [64], [list(range(1, 65))], [40]).accept() == [list(range(40))]

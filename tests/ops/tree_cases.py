"""Draft trees, and their root-to-leaf paths as a ragged batch: what the recurrent forms, which know no trees, run on.

Shapes: B rows, T nodes of a tree, L flat tokens of all paths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, draft_tree
from hybrid_runtime.ops.ragged import RaggedLayout

Parents = list[int]

LARGE_SHAPES = ["random", "full", "chain"]


def large_parents(shape: str, num_rows: int = 2, num_nodes: int = 64) -> list[Parents]:
    """Rows of trees of one shape; the random ones differ from row to row."""
    source = random.Random(0)
    parent_of = {
        "random": lambda node: source.randrange(node),
        "full": lambda node: (node - 1) // 4,
        "chain": lambda node: node - 1,
    }[shape]
    return [[0, *(parent_of(node) for node in range(1, num_nodes))] for _ in range(num_rows)]


@st.composite
def small_parents(draw: st.DrawFn, max_nodes: int = 9, max_rows: int = 3) -> list[Parents]:
    num_nodes = draw(st.integers(1, max_nodes))
    parent_lists = st.tuples(st.just(0), *(st.integers(0, node - 1) for node in range(1, num_nodes))).map(list)
    return draw(st.lists(parent_lists, min_size=1, max_size=max_rows))


def build_tree(parents: Sequence[Parents]) -> DraftTree:
    return draft_tree(torch.tensor(parents))


def path_to(parents: Parents, node: int) -> list[int]:
    """From the root to `node`."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def path_to_ends(parents: Sequence[Parents], ends: Sequence[int | None]) -> AcceptedPath:
    """The paths to one node of each row; None: a row without accepted nodes."""
    nodes_BT = torch.zeros(len(parents), len(parents[0]), dtype=torch.int64)
    num_nodes_B = torch.zeros(len(parents), dtype=torch.int64)
    for row, end in enumerate(ends):
        if end is not None:
            path = path_to(parents[row], end)
            nodes_BT[row, : len(path)] = torch.tensor(path)
            num_nodes_B[row] = len(path)
    return AcceptedPath(nodes_BT, num_nodes_B)


@dataclass(frozen=True)
class PathBatch:
    """Every root-to-leaf path of every row as a sequence of its own."""

    layout: RaggedLayout  # asks for the state behind every token
    rows_S: Tensor
    rows_L: Tensor
    nodes_L: Tensor
    tokens_BT: Tensor  # a flat token that stands for the node

    @classmethod
    def of(cls, parents: Sequence[Parents]) -> PathBatch:
        sequences = []
        for row, own in enumerate(parents):
            leaves = sorted(set(range(len(own))) - set(own[1:]))
            sequences += [(row, path_to(own, leaf)) for leaf in leaves]
        lengths = [len(path) for _, path in sequences]
        rows_S = torch.tensor([row for row, _ in sequences])
        rows_L = rows_S.repeat_interleave(torch.tensor(lengths))
        nodes_L = torch.tensor([node for _, path in sequences for node in path])
        tokens_BT = torch.zeros(len(parents), len(parents[0]), dtype=torch.int64)
        tokens_BT[rows_L, nodes_L] = torch.arange(len(nodes_L))
        layout = RaggedLayout.build(lengths, [list(range(1, length + 1)) for length in lengths])
        return cls(layout, rows_S, rows_L, nodes_L, tokens_BT)

    def tokens(self, x_BT: Tensor) -> Tensor:
        """`[B, T, ...]` to `[L, ...]`."""
        return x_BT[self.rows_L, self.nodes_L]


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal, and NaN where the other is NaN; tells -0 from 0."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return actual.dtype == expected.dtype and torch.equal(actual.view(integers), expected.view(integers))

"""The accept rule against a walk that asks, at each node, which child bears the token that the target chose there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.engine.verifying import accepted_nodes


@dataclass(frozen=True)
class Verdict:
    token_ids: list[int]
    parents: list[int]
    chosen: list[int]
    ends: frozenset[int]
    max_accepted: int

    def path(self) -> list[int]:
        return accepted_nodes(
            np.array(self.token_ids),
            np.array(self.parents),
            np.array(self.chosen),
            end_token_ids=self.ends,
            max_accepted=self.max_accepted,
        )

    def walked(self) -> list[int]:
        path = [0]
        while len(path) < self.max_accepted:
            wanted = self.chosen[path[-1]]
            children = [node for node in range(1, len(self.parents)) if self.parents[node] == path[-1]]
            hits = [node for node in children if self.token_ids[node] == wanted]
            if not hits or wanted in self.ends:
                break
            path.append(hits[0])
        return path


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Three tokens at most, so that drafts often hit and siblings are often equal."""
    num_nodes = draw(st.integers(1, 12))
    tokens = st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes)
    parents = [0, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    ends = draw(st.frozensets(st.integers(0, 2), max_size=1))
    return Verdict(draw(tokens), parents, draw(tokens), ends, draw(st.integers(1, num_nodes)))


@given(verdicts())
def test_the_path_is_that_of_the_walk(verdict: Verdict) -> None:
    assert verdict.path() == verdict.walked()


def test_a_token_that_ends_the_request_is_not_accepted() -> None:
    """It would need KV and a state that nobody reads."""
    verdict = Verdict([5, 7, 8], [0, 0, 1], [7, 8, 9], frozenset({8}), 3)
    assert verdict.path() == [0, 1]

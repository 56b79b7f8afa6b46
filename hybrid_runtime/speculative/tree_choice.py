"""The draft tree of a drafter that has probabilities: the candidates with the highest joint probability.

As in EAGLE-2 (Li et al. 2024): each step expands the `topk` best nodes of the level before, each into `topk` children,
and in the end the best of all candidates are kept. A path's score is the sum of its log probabilities, which falls from
parent to child; ties go to the candidate of the earlier level. So the parent of a kept node is kept as well, and comes
before it.
"""

# Shapes: B rows, M nodes that were expanded, K = topk children of each, C candidates so far.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.speculative.draft import Draft, Int32Array
from hybrid_runtime.speculative_config import max_num_draft_tokens

_ROOT = -1  # as the parent of a candidate


@dataclass(frozen=True)
class Frontier:
    """What a drafter runs next: the best `topk` nodes of the last level, the best first.

    Fields:
    token_ids_BK: int32
    beams_BK: int64; each one's parent, as an index into the nodes that were expanded last (0 after the first step)
    """

    token_ids_BK: Int32Array
    beams_BK: NDArray[np.int64]


class TreeBuilder:
    """Collects the candidates of one round of drafting, for several rows at once; used once.

    `add_level` after each forward of the drafter, up to `num_steps` times, then `drafts`. With `topk` 1 every draft is
    a chain.
    """

    def __init__(self, topk: int, num_steps: int, max_nodes: int) -> None:
        """`max_nodes` are kept, the root not counted. Raises ValueError if there are not so many candidates."""
        for name, value in (("topk", topk), ("num_steps", num_steps), ("max_nodes", max_nodes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        most = max_num_draft_tokens(topk, num_steps) - 1
        if max_nodes > most:
            raise ValueError(f"max_nodes={max_nodes}, but topk={topk}, num_steps={num_steps} give {most} candidates")
        self._topk, self._num_steps, self._max_nodes = topk, num_steps, max_nodes
        # One array per level, its candidates side by side.
        self._token_ids: list[Int32Array] = []
        self._scores: list[NDArray[np.float64]] = []
        self._parents: list[NDArray[np.int64]] = []
        self._expanded_BM: NDArray[np.int64] | None = None  # candidates, whose children come next

    def add_level(self, token_ids_BMK: Int32Array, log_probs_BMK: NDArray[np.floating]) -> Frontier:
        """Takes in the children of the nodes expanded last: of the root (M = 1) at first, then of the frontier (M = K).

        A child with the log probability -inf (or NaN) is none: it is never kept. O(K² log K) per row.
        """
        if len(self._scores) == self._num_steps:
            raise ValueError(f"all {self._num_steps} levels of the tree are there")
        num_rows, num_expanded = len(token_ids_BMK), self._topk if self._scores else 1
        shape = (num_rows, num_expanded, self._topk)
        if token_ids_BMK.shape != shape or log_probs_BMK.shape != shape:
            raise ValueError(f"expected children of shape {shape}, got {token_ids_BMK.shape}, {log_probs_BMK.shape}")
        first = sum(scores.shape[1] for scores in self._scores)
        # Rounding may leave a log probability above 0, and a child must not be better than its parent.
        scores_BMK = np.minimum(np.where(np.isnan(log_probs_BMK), -np.inf, log_probs_BMK), 0.0).astype(np.float64)
        if self._expanded_BM is None:
            parents_BM = np.full((num_rows, 1), _ROOT)
        else:
            parents_BM = self._expanded_BM
            last_first = first - self._scores[-1].shape[1]
            scores_BMK += np.take_along_axis(self._scores[-1], parents_BM - last_first, axis=1)[..., None]
        flat = num_rows, num_expanded * self._topk
        self._token_ids.append(token_ids_BMK.reshape(flat).astype(np.int32))
        self._scores.append(scores_BMK.reshape(flat))
        self._parents.append(np.repeat(parents_BM, self._topk, axis=1))
        best_BK = _best(self._scores[-1], self._topk)
        self._expanded_BM = first + best_BK
        return Frontier(np.take_along_axis(self._token_ids[-1], best_BK, axis=1), best_BK // self._topk)

    def drafts(self, max_nodes_B: Sequence[int] | None = None) -> list[Draft]:
        """The best `max_nodes` candidates of each row, the best first; of row b at most `max_nodes_B[b]`."""
        if not self._scores:
            raise ValueError("no level of the tree is there")
        token_ids_BC = np.concatenate(self._token_ids, axis=1)
        scores_BC = np.concatenate(self._scores, axis=1)
        parents_BC = np.concatenate(self._parents, axis=1)
        num_rows, num_candidates = scores_BC.shape
        best_BN = _best(scores_BC, min(self._max_nodes, num_candidates))
        nodes_BC = np.zeros((num_rows, num_candidates + 1), dtype=np.int32)  # the last is the root's: index -1
        np.put_along_axis(nodes_BC, best_BN, np.arange(1, best_BN.shape[1] + 1, dtype=np.int32)[None], axis=1)
        parents_BN = np.take_along_axis(nodes_BC, np.take_along_axis(parents_BC, best_BN, axis=1), axis=1)
        token_ids_BN = np.take_along_axis(token_ids_BC, best_BN, axis=1)
        sizes_B = np.isfinite(np.take_along_axis(scores_BC, best_BN, axis=1)).sum(axis=1)
        if max_nodes_B is not None:
            sizes_B = np.minimum(sizes_B, np.asarray(max_nodes_B, dtype=np.int64))
        return [Draft(token_ids_BN[b, :size], parents_BN[b, :size]) for b, size in enumerate(sizes_B.tolist())]


def _best(scores_BC: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """Indices of the `num` highest scores of each row, the highest first; of equal ones the first."""
    return np.argsort(-scores_BC, axis=1, kind="stable")[:, :num]

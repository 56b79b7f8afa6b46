"""TreeBuilder against sorted lists of all candidates, driven by a drafter whose probabilities depend on the path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_runtime.speculative.draft import Draft, DraftRow, check_draft
from hybrid_runtime.speculative.tree_choice import TreeBuilder
from hybrid_runtime.speculative_config import max_num_draft_tokens

VOCAB_SIZE = 20
Path = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """Log probabilities are multiples of 1/4, so that sums are exact and ties frequent; some tokens are impossible."""

    seed: int
    topk: int

    def children(self, path: Path) -> tuple[list[int], list[float]]:
        generator = np.random.default_rng([self.seed, *path])
        token_ids = generator.choice(VOCAB_SIZE, self.topk, replace=False)
        log_probs = np.where(generator.random(self.topk) < 0.1, -np.inf, -generator.integers(0, 6, self.topk) / 4)
        return token_ids.tolist(), log_probs.tolist()

    def score(self, path: Path) -> float:
        total = 0.0
        for depth, token in enumerate(path):
            token_ids, log_probs = self.children(path[:depth])
            total += log_probs[token_ids.index(token)]
        return total

    def extended(self, path: Path) -> list[Path]:
        return [(*path, token) for token in self.children(path)[0]]


def candidates_of(model: Model, num_steps: int) -> list[Path]:
    """Level by level, the children of the best `topk` of the level before."""
    level = model.extended(())
    candidates = list(level)
    for _ in range(num_steps - 1):
        best = sorted(level, key=model.score, reverse=True)[: model.topk]  # stable, also when reversed
        level = [child for path in best for child in model.extended(path)]
        candidates += level
    return candidates


def built(models: list[Model], num_steps: int, max_nodes: int, limits: list[int] | None = None) -> list[Draft]:
    """The drafts of a drafter that runs all rows together."""
    topk = models[0].topk
    builder = TreeBuilder(topk, num_steps, max_nodes)
    paths: list[list[Path]] = [[()] for _ in models]
    for _ in range(num_steps):
        children = [[model.children(path) for path in row] for model, row in zip(models, paths, strict=True)]
        frontier = builder.add_level(
            np.array([[token_ids for token_ids, _ in row] for row in children], dtype=np.int32),
            np.array([[log_probs for _, log_probs in row] for row in children], dtype=np.float32),
        )
        paths = [
            [(*row[beam], token) for token, beam in zip(token_ids.tolist(), beams.tolist(), strict=True)]
            for row, token_ids, beams in zip(paths, frontier.token_ids_BK, frontier.beams_BK, strict=True)
        ]
    return builder.drafts(limits)


def paths_of(draft: Draft) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Model], int, int]:
    topk, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    models = [Model(seed, topk) for seed in draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=3))]
    return models, num_steps, draw(st.integers(1, max_num_draft_tokens(topk, num_steps) - 1))


@settings(max_examples=100, deadline=None)
@given(rounds=rounds(), data=st.data())
def test_the_best_candidates_are_drafted_the_best_first(rounds, data):
    models, num_steps, max_nodes = rounds
    limits = data.draw(st.none() | st.lists(st.integers(0, 12), min_size=len(models), max_size=len(models)))
    for b, (model, draft) in enumerate(zip(models, built(models, num_steps, max_nodes, limits), strict=True)):
        limit = max_nodes if limits is None else min(max_nodes, limits[b])
        check_draft(draft, DraftRow(b, np.zeros(1, dtype=np.int32), limit), vocab_size=VOCAB_SIZE)
        possible = [path for path in candidates_of(model, num_steps) if np.isfinite(model.score(path))]
        assert paths_of(draft) == sorted(possible, key=model.score, reverse=True)[:limit]


@settings(max_examples=50, deadline=None)
@given(rounds=rounds())
def test_of_all_paths_there_are_none_better_than_the_first_topk(rounds):
    """Every path of up to `num_steps` tokens is scored: the ancestors of the best `topk` are always expanded."""
    (model, *_), num_steps, max_nodes = rounds
    every, level = [], [()]
    for _ in range(num_steps):
        level = [child for path in level for child in model.extended(path)]
        every += level
    scores = [model.score(path) for path in paths_of(built([model], num_steps, max_nodes)[0])]
    best = sorted((score for score in map(model.score, every) if np.isfinite(score)), reverse=True)
    num = min(max_nodes, model.topk)
    assert scores[:num] == best[:num]


def test_a_chain_has_all_its_steps():
    (draft,) = built([Model(1, 1)], num_steps=3, max_nodes=3)
    assert draft.parents.tolist() == [0, 1, 2]


def test_certain_tokens_tie_with_their_parents_and_come_after_them():
    builder = TreeBuilder(2, 3, 10)
    for num_expanded in (1, 2, 2):
        shape = (1, num_expanded, 2)
        builder.add_level(np.zeros(shape, dtype=np.int32), np.zeros(shape))
    (draft,) = builder.drafts()
    assert (draft.parents <= np.arange(10)).all()
    assert all(shorter <= longer for shorter, longer in pairwise(map(len, paths_of(draft))))


def test_a_log_probability_above_zero_is_a_certain_one_and_nan_is_none():
    builder = TreeBuilder(2, 2, 6)
    builder.add_level(np.array([[[1, 2]]], dtype=np.int32), np.array([[[-1.0, np.nan]]]))
    builder.add_level(np.array([[[3, 4], [5, 6]]], dtype=np.int32), np.array([[[1e-3, -0.5], [0.0, 0.0]]]))
    (draft,) = builder.drafts()
    assert paths_of(draft) == [(1,), (1, 3), (1, 4)]


def test_no_rows_give_no_drafts():
    builder = TreeBuilder(2, 2, 6)
    builder.add_level(np.zeros((0, 1, 2), dtype=np.int32), np.zeros((0, 1, 2)))
    assert builder.drafts() == []


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="max_nodes=11, but topk=2, num_steps=3 give 10 candidates"):
        TreeBuilder(2, 3, 11)
    with pytest.raises(ValueError, match="topk must be at least 1, not 0"):
        TreeBuilder(0, 3, 1)
    builder = TreeBuilder(2, 1, 2)
    with pytest.raises(ValueError, match="no level"):
        builder.drafts()
    with pytest.raises(ValueError, match=r"shape \(1, 1, 2\), got \(1, 2, 2\)"):
        builder.add_level(np.zeros((1, 2, 2), dtype=np.int32), np.zeros((1, 2, 2)))
    builder.add_level(np.zeros((1, 1, 2), dtype=np.int32), np.zeros((1, 1, 2)))
    with pytest.raises(ValueError, match="all 1 levels"):
        builder.add_level(np.zeros((1, 2, 2), dtype=np.int32), np.zeros((1, 2, 2)))

"""Sampled tokens have the target's distribution, whatever is drafted: chi-square tests of two tokens together.

The drafts hit often, so that a rule that accepts too much shows.

Shapes: V vocabulary, S samples, N nodes of a draft tree, or contexts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime, SamplingParams
from hybrid_runtime.engine import verifying
from hybrid_runtime.engine.verifying import accepted_nodes
from hybrid_runtime.ops.draw import DrawInputs, draw_tokens
from hybrid_runtime.speculative.draft import Draft, DraftRow
from tests.parity.zoo import CASES
from tests.speculative.speculative_runs import ROOMY, config, num_accepted

NUM_SAMPLES = 20_000
NUM_ENGINE_SAMPLES = 800
ALPHA = 1e-4
VOCAB = 8
PROMPT = (3, 5, 1, 7)
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.85},
]
CHAIN = Draft.chain([5, 6, 1])
TREE = Draft(np.array([5, 7, 6, 3, 3, 1, 5], dtype=np.int32), np.array([0, 0, 1, 2, 1, 3, 0], dtype=np.int32))
drafts = pytest.mark.parametrize("draft", [CHAIN, TREE], ids=["chain", "tree"])
Counts = NDArray[np.int64]
Probabilities = NDArray[np.float64]
Accept = Callable[..., list[int]]


@cache
def tiny_model() -> PreTrainedModel:
    """A model of the zoo, but with eight tokens; in float64."""
    case = next(case for case in CASES if case.name == "qwen-sparse-steps")
    options = {**case.options, "vocab_size": VOCAB, "eos_token_id": None}
    return dataclasses.replace(case, options=options).build().double()


@cache
@torch.no_grad()
def logits_behind(*tokens: int) -> Tensor:
    """`[V]` float64 behind the prompt and some tokens, by transformers."""
    return tiny_model()(torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1].double()


def probabilities(filters: dict[str, Any], *tokens: int) -> Probabilities:
    """`[V]` by definition: temperature, then the top-k, then the fewest tokens whose share reaches top-p."""
    probs = torch.softmax(logits_behind(*tokens) / filters["temperature"], dim=-1).numpy()
    order = np.argsort(-probs, kind="stable")[: filters.get("top_k", VOCAB)]
    shares = probs[order] / probs[order].sum()
    num_kept = int((np.cumsum(shares) - shares < filters.get("top_p", 1.0)).sum())
    kept = np.zeros(VOCAB)
    kept[order[:num_kept]] = shares[:num_kept] / shares[:num_kept].sum()
    return kept


def joint(filters: dict[str, Any], *tokens: int) -> Probabilities:
    """`[V, V]` of the next two tokens."""
    behind = np.stack([probabilities(filters, *tokens, token) for token in range(VOCAB)])
    return probabilities(filters, *tokens)[:, None] * behind


def p_value(counts: Counts, expected: Probabilities) -> float:
    """Pearson's chi-square test; cells that are expected fewer than five times count as one. 0 for what cannot be."""
    if counts[expected == 0].any():
        return 0.0
    wanted = expected * counts.sum()
    is_rare = wanted < 5
    cells = [
        (counts[~is_rare], wanted[~is_rare]),
        (counts[is_rare].sum(keepdims=True), wanted[is_rare].sum(keepdims=True)),
    ]
    observed_C, wanted_C = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    is_cell = wanted_C > 0
    statistic = float((((observed_C - wanted_C) ** 2)[is_cell] / wanted_C[is_cell]).sum())
    half_freedom = torch.tensor((is_cell.sum() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def draws(filters: dict[str, Any], contexts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """`[S, N]`: behind each context a draw with the key of sample s at that place of the text."""
    num = NUM_SAMPLES * len(contexts)
    positions_N = torch.tensor([len(PROMPT) + len(tokens) for tokens in contexts])
    options = DrawInputs(
        temperature_B=torch.full((num,), filters["temperature"], dtype=torch.float64),
        min_p_B=None,
        top_k_B=torch.full((num,), filters.get("top_k", VOCAB)),
        top_p_B=torch.full((num,), filters.get("top_p", 1.0), dtype=torch.float64),
        seeds_B=torch.arange(NUM_SAMPLES).repeat_interleave(len(contexts)),
        sample_indices_B=torch.zeros(num, dtype=torch.int64),
        positions_B=positions_N.repeat(NUM_SAMPLES),
    )
    logits_NV = torch.stack([logits_behind(*tokens) for tokens in contexts])
    return draw_tokens(logits_NV.repeat(NUM_SAMPLES, 1), options).reshape(NUM_SAMPLES, len(contexts)).numpy()


def paths_of(draft: Draft) -> list[list[int]]:
    """The tokens from behind the root to each node."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        paths.append([*paths[parent], token])
    return paths


def count_pairs(draft: Draft, chosen_SN: NDArray[np.int64], next_SV: NDArray[np.int64], accept: Accept) -> Counts:
    """`[V, V]` counts of the first two tokens that rounds from the prompt's end bring.

    A round that brings one token alone is followed by one without a draft.
    """
    token_ids_N, parents_N = np.append(PROMPT[-1], draft.token_ids), np.append(0, draft.parents)
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for chosen_N, next_V in zip(chosen_SN, next_SV, strict=True):
        path = accept(token_ids_N, parents_N, chosen_N, end_token_ids=frozenset(), max_accepted=9)
        first, second, *_ = [*token_ids_N[path[1:]], chosen_N[path[-1]], None]
        counts[first, next_V[first] if second is None else second] += 1
    return counts


def accept_always(token_ids_T: Any, parents_T: Any, chosen_T: Any, **options: Any) -> list[int]:
    """Planted: the first child, whatever the target chose."""
    return [0, 1] if len(token_ids_T) > 1 and options["max_accepted"] > 1 else [0]


def accept_too_often(token_ids_T: Any, parents_T: Any, chosen_T: Any, **options: Any) -> list[int]:
    """Planted: where the target chose token 3, the first child instead."""
    return (
        accept_always(token_ids_T, parents_T, chosen_T, **options)
        if chosen_T[0] == 3
        else accepted_nodes(token_ids_T, parents_T, chosen_T, **options)
    )


@drafts
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_first_two_tokens_have_the_targets_joint_distribution(filters: dict[str, Any], draft: Draft) -> None:
    expected = joint(filters)
    chosen_SN = draws(filters, paths_of(draft))
    next_SV = draws(filters, [[token] for token in range(VOCAB)])
    assert p_value(count_pairs(draft, chosen_SN, next_SV, accepted_nodes), expected) > ALPHA
    for biased in (accept_always, accept_too_often):
        assert p_value(count_pairs(draft, chosen_SN, next_SV, biased), expected) < ALPHA


class Fixed:
    """Drafts the same tree again and again."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft(self._draft.token_ids[: r.max_nodes], self._draft.parents[: r.max_nodes]) for r in rows]


def pairs_of_a_runtime(filters: dict[str, Any], draft: Draft) -> Counts:
    """`[V, V]` counts of the second and the third token: those that the first round brings."""
    options = {**ROOMY, "num_kv_slots": 4000, "num_state_slots": 300, "max_num_seqs": 200, "debug_checks": False}
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    params = [SamplingParams(max_tokens=4, seed=seed, **filters) for seed in range(NUM_ENGINE_SAMPLES)]
    with HybridRuntime(
        tiny_model(), drafter=Fixed(draft), speculative=config(num_nodes=1 + len(draft)), **options
    ) as rt:
        for output in rt.generate([list(PROMPT)] * NUM_ENGINE_SAMPLES, params):
            counts[output.outputs[0].token_ids[1:3]] += 1
        assert num_accepted(rt) > NUM_ENGINE_SAMPLES // 10
    return counts


@drafts
def test_so_have_those_of_a_runtime(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    filters = FILTERS[-1]
    first_V = probabilities(filters)
    expected = sum(first_V[token] * joint(filters, token) for token in np.flatnonzero(first_V).tolist())
    assert p_value(pairs_of_a_runtime(filters, draft), expected) > ALPHA
    monkeypatch.setattr(verifying, "accepted_nodes", accept_always)
    assert p_value(pairs_of_a_runtime(filters, draft), expected) < ALPHA

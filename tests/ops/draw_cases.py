"""Draws and the tokens that they may give, token by token from the definitions of the options.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.noise import gumbel_noise

OFF = 2**40  # a top-k beyond every vocabulary


@dataclass(frozen=True)
class RowOptions:
    """The options of one row."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = OFF
    top_p: float = 1.0
    seed: int = 0
    sample: int = 0
    position: int = 0


def inputs_of(rows: list[RowOptions], *, all_filters: bool = False) -> DrawInputs:
    """Filters that no row uses are None, unless `all_filters`."""

    def doubles(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    min_p, top_k, top_p = [r.min_p for r in rows], [r.top_k for r in rows], [r.top_p for r in rows]
    return DrawInputs(
        doubles([r.temperature for r in rows]),
        doubles(min_p) if all_filters or any(min_p) else None,
        integers(top_k) if all_filters or min(top_k, default=OFF) < OFF else None,
        doubles(top_p) if all_filters or min(top_p, default=1.0) < 1 else None,
        integers([r.seed for r in rows]),
        integers([r.sample for r in rows]),
        integers([r.position for r in rows]),
    )


def noise_of(row: RowOptions, num_tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The noise [V] of a row's tokens."""
    seed, sample, position = (torch.tensor([value]) for value in (row.seed, row.sample, row.position))
    return gumbel_noise(seed, sample, position, num_tokens, dtype)[0]


def possible_tokens(logits_V: Tensor, row: RowOptions) -> set[int]:
    """The tokens that a form may give, whatever it rounds; mostly one.

    Scores are rounded alike in every form, so that equal ones stay equal. What may differ is the logarithm of min-p, by
    a unit in the last place; the share of the tokens ahead of one, by a unit for each token and a few for the
    exponentials; and score + noise, by the roundings of two logarithms and a sum.
    """
    logits: NDArray[Any] = logits_V.numpy()
    info = np.finfo(logits.dtype)
    if row.temperature == 0:
        return {int(logits.argmax())}
    logits = np.minimum(logits, info.max)
    temperature = np.asarray(min(max(row.temperature, float(info.tiny)), float(info.max)), logits.dtype)
    with np.errstate(over="ignore"):
        scores = (logits - max(logits.max(), info.min)) / temperature
    if scores.max() == -np.inf:
        return {0}
    floor = math.log(row.min_p) if row.min_p > 0 else -math.inf
    slack = 0.0 if math.isinf(floor) else 2 * float(info.eps) * abs(floor)
    noise = noise_of(row, len(logits), logits_V.dtype).double().numpy()
    totals = scores.astype(float) + noise
    slacks = 2 * float(info.eps) * (2 + np.abs(noise) + np.abs(totals))
    possible: set[int] = set()
    for lowest in {floor - slack, floor + slack}:
        certain, uncertain = _kept(scores.astype(float), lowest, row, float(info.eps))
        reached = max(totals[token] - slacks[token] for token in certain)
        possible |= {token for token in certain | uncertain if totals[token] + slacks[token] >= reached}
    return possible


def _kept(scores: NDArray[np.float64], lowest: float, row: RowOptions, eps: float) -> tuple[set[int], set[int]]:
    """Tokens that the filters leave for certain, and those that rounding decides about."""
    order = sorted((i for i, score in enumerate(scores) if score >= lowest), key=lambda i: (-scores[i], i))
    order = [i for i in order[: row.top_k] if scores[i] > -math.inf]
    if row.top_p >= 1:
        return set(order), set()
    weights = [math.exp(scores[i]) for i in order]
    total, slack = math.fsum(weights), eps * (len(scores) + 8)
    certain, uncertain = set(), set()
    for place, token in enumerate(order):
        share = math.fsum(weights[:place]) / total
        if place == 0 or share < row.top_p - slack:
            certain.add(token)
        elif share < row.top_p + slack:
            uncertain.add(token)
    return certain, uncertain


def check_rows(ids_B: Tensor, logits_BV: Tensor, rows: list[RowOptions]) -> None:
    """Each id is one that the definitions give."""
    assert ids_B.dtype == torch.int64
    assert ids_B.shape == logits_BV.shape[:1]
    for token, logits_V, row in zip(ids_B.tolist(), logits_BV, rows, strict=True):
        assert token in possible_tokens(logits_V, row), row


def check_exact_shares(form: Callable[[Tensor, DrawInputs], Tensor]) -> None:
    """Eighths are summed without rounding: top-p stops at the token that reaches p, and top-k at k."""
    for options, num_left in ((RowOptions(top_p=0.25), 2), (RowOptions(top_p=0.5), 4), (RowOptions(top_k=3), 3)):
        rows = [replace(options, seed=seed) for seed in range(40)]
        for dtype in (torch.float32, torch.float64):
            ids_B = form(torch.zeros(len(rows), 8, dtype=dtype), inputs_of(rows))
            assert set(ids_B.tolist()) == set(range(num_left))


ROWS = st.builds(
    RowOptions,
    temperature=st.sampled_from([0.0, 1e-300, 1e-3, 0.5, 1.0, 1.0, 3.0, 1e3, 1e300]),
    min_p=st.sampled_from([0.0, 0.0, 1e-60, 0.03, 0.3, math.exp(-2), 1.0]),
    top_k=st.sampled_from([OFF, OFF, 1, 2, 3, 7, 40]),
    top_p=st.sampled_from([1.0, 1.0, 1e-12, 0.25, 0.5, 0.8, 0.95, 1 - 1e-9]),
    seed=st.integers(-(2**63), 2**63 - 1),
    sample=st.sampled_from([0, 1, 2**32 - 1]),
    position=st.integers(0, 2**32 - 1),
)


@st.composite
def draws(draw: st.DrawFn, sizes: tuple[int, ...], max_rows: int = 4) -> tuple[Tensor, list[RowOptions]]:
    """float64 logits, and options: few or many values, ties, -inf and +inf."""
    rows = draw(st.lists(ROWS, min_size=1, max_size=max_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits_BV = torch.randn(len(rows), draw(st.sampled_from(sizes)), generator=generator, dtype=torch.float64)
    logits_BV *= draw(st.sampled_from([0.0, 1e-3, 1.0, 3.0, 1e300]))
    if draw(st.booleans()):
        logits_BV = logits_BV.clamp(-1e3, 1e3).round()
    for value in draw(st.lists(st.sampled_from([-math.inf, -math.inf, math.inf]), max_size=2)):
        logits_BV[torch.rand(logits_BV.shape, generator=generator) < draw(st.sampled_from([0.1, 0.9, 1.0]))] = value
    return logits_BV, rows

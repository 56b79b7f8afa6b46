"""What a step's forwards bring back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.sampling import GatheredLogprobs
from hybrid_runtime.scheduling.request import Request


@dataclass(frozen=True)
class RankedLogprobs:
    """Log-probability and rank of one token, and the most likely tokens at its place."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class SampledToken:
    """The next token of a request."""

    request: Request
    token_id: int
    logprobs: RankedLogprobs | None


@dataclass(frozen=True)
class ScoredToken:
    """A prompt token of a request with its log-probability given the tokens before it."""

    request: Request
    token_id: int
    logprobs: RankedLogprobs


@dataclass
class SpeculationCounts:
    """Of all verifies since the start; tokens are drafted ones, without roots. Who accepts some delivers one more."""

    num_rows: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in one row of a verify."""
        self.num_rows += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted


@dataclass(frozen=True, eq=False)
class VerifiedRow:
    """What the verify of a draft brought: the accepted nodes, from the root down, and the tokens that follow each."""

    request: Request
    nodes: NDArray[np.int64]
    num_drafted: int  # nodes without the root
    sampled: list[SampledToken]  # the tokens of the nodes behind the root, then one more


@dataclass(frozen=True, eq=False)
class VerifiedBatch:
    """All rows of a verify, in the order of the batch, and the residual stream `[N, D]` behind their nodes."""

    rows: tuple[VerifiedRow, ...]
    hidden_ND: Tensor


@dataclass(frozen=True)
class ForwardResult:
    """What one forward brought. Requests in `invalid` got logits that are not numbers: nothing of theirs is kept.

    `verified`: of a verify, whose states are yet to follow.
    """

    sampled: list[SampledToken]
    scored: list[ScoredToken]  # in order of position for each request
    invalid: frozenset[Request]
    verified: VerifiedBatch | None = None


def rank_logprobs(gathered: GatheredLogprobs, counts: Sequence[int]) -> list[RankedLogprobs]:
    """Per row, with the `counts[row]` most likely tokens. Waits for the device."""
    return [
        RankedLogprobs(logprob, rank, top_ids[:count], top_logprobs[:count])
        for logprob, rank, top_ids, top_logprobs, count in zip(
            gathered.token_logprobs_B.tolist(),
            gathered.token_ranks_B.tolist(),
            gathered.top_ids_BN.tolist(),
            gathered.top_logprobs_BN.tolist(),
            counts,
            strict=True,
        )
    ]

"""What a step's forwards bring back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class ForwardResult:
    """What one forward brought. Requests in `invalid` got logits that are not numbers: nothing of theirs is kept."""

    sampled: list[SampledToken]
    scored: list[ScoredToken]  # in order of position for each request
    invalid: frozenset[Request]


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

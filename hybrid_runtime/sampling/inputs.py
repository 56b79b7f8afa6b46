"""The tensors that the sampler reads, and how they are built from the sampling parameters of a batch's rows.

Shapes: B rows, V tokens of the vocabulary, E single logits that are changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.sampling_params import SamplingParams

TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """What decides the next token of one row, besides its logits."""

    params: SamplingParams
    seed: int  # the request's, or one that the caller drew from the runtime's
    sample_index: int  # which of the request's `n` samples
    position: int  # absolute position of the token to be chosen
    prompt_token_ids: Iterable[int] = ()  # read only where a repetition penalty asks for them
    output_token_ids: Iterable[int] = ()  # read only where a penalty asks for them
    forbidden_token_ids: Sequence[int] = ()  # end and stop tokens while `min_tokens` is not reached


@dataclass(frozen=True)
class BiasInputs:
    """Values to be added to single logits; a forbidden token has -inf. A logit may be named more than once."""

    rows_E: Tensor  # int64
    token_ids_E: Tensor  # int64
    values_E: Tensor  # float64


@dataclass(frozen=True)
class PenaltyInputs:
    """Penalties of tokens that occurred; a row without has neutral ones."""

    repetition_B: Tensor  # float64; neutral: 1
    presence_B: Tensor  # float64; neutral: 0
    frequency_B: Tensor  # float64; neutral: 0
    output_counts_BV: Tensor  # int32, how often each token occurs in the output
    prompt_mask_BV: Tensor  # bool, whether it occurs in the prompt


@dataclass(frozen=True)
class SamplingInputs:
    """All options of B rows. A part is None if no row needs it, so that a plain greedy batch holds no tensor."""

    bias: BiasInputs | None
    penalties: PenaltyInputs | None
    draw: DrawInputs | None  # None: all rows are greedy
    num_logprobs: int | None  # the most that a row wants; None: no row wants any

    @property
    def change_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's."""
        return self.bias is not None or self.penalties is not None

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str = "cpu") -> SamplingInputs:
        """Inputs for `rows`, in their order. Token ids must be below `vocab_size`.

        Costs O(B), and for rows with a repetition, presence or frequency penalty O(V + their tokens).
        """
        wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        return cls(
            bias=_build_bias(rows, device),
            penalties=_build_penalties(rows, vocab_size, device),
            draw=_build_draw(rows, vocab_size, device),
            num_logprobs=max(wanted, default=None),
        )


def _build_bias(rows: Sequence[SamplingRow], device: torch.device | str) -> BiasInputs | None:
    entries = [
        (row_index, token_id, value)
        for row_index, row in enumerate(rows)
        for token_id, value in chain(
            (row.params.logit_bias or {}).items(), ((token_id, -torch.inf) for token_id in row.forbidden_token_ids)
        )
    ]
    if not entries:
        return None
    row_indices, token_ids, values = zip(*entries, strict=True)
    return BiasInputs(_int64(row_indices, device), _int64(token_ids, device), _float64(values, device))


def _build_penalties(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> PenaltyInputs | None:
    if not any(row.params.has_penalty for row in rows):
        return None
    counts_BV = torch.zeros(len(rows), vocab_size, dtype=torch.int32)
    prompt_mask_BV = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for row_index, row in enumerate(rows):
        if not row.params.has_penalty:
            continue
        token_ids, counts = np.unique(np.asarray(row.output_token_ids, np.int64), return_counts=True)
        counts_BV[row_index, torch.from_numpy(token_ids)] = torch.from_numpy(counts.astype(np.int32))
        if row.params.repetition_penalty != 1:
            prompt_mask_BV[row_index, torch.from_numpy(np.array(row.prompt_token_ids, np.int64))] = True
    return PenaltyInputs(
        _float64([row.params.repetition_penalty for row in rows], device),
        _float64([row.params.presence_penalty for row in rows], device),
        _float64([row.params.frequency_penalty for row in rows], device),
        counts_BV.to(device),
        prompt_mask_BV.to(device),
    )


def _build_draw(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> DrawInputs | None:
    params = [row.params for row in rows]
    if all(p.is_greedy for p in params):
        return None
    neutral = SamplingParams(
        temperature=0
    )  # a greedy row's filters choose nothing, and must not cost the others a sort
    active = [neutral if p.is_greedy else p for p in params]
    min_p = [p.min_p for p in active]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in active]
    top_p = [p.top_p for p in active]
    return DrawInputs(
        temperature_B=_float64([p.temperature for p in active], device),
        min_p_B=_float64(min_p, device) if max(min_p) > 0 else None,
        top_k_B=_int64(top_k, device) if min(top_k) < vocab_size else None,
        top_p_B=_float64(top_p, device) if min(top_p) < 1 else None,
        seeds_B=_int64([row.seed for row in rows], device),
        sample_indices_B=_int64([row.sample_index for row in rows], device),
        positions_B=_int64([row.position for row in rows], device),
    )


def _int64(values: Iterable[int], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def _float64(values: Iterable[float], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=device)

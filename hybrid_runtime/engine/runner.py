"""Runs the forwards of a step on the device and reads back what the host needs.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.engine.batches import build_decode, build_prefill
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE
from hybrid_runtime.sampling import GatheredLogprobs, SamplingInputs, SamplingRow, gather_logprobs, sample
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Admission
from hybrid_runtime.scheduling.scheduler import PrefillChunk


@dataclass(frozen=True)
class RankedLogprobs:
    """Log-probability and rank of one token, and the most likely tokens at its place."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class SampledToken:
    """The next token of a request. `is_valid` is False if the logits were not numbers: then there is no token."""

    request: Request
    token_id: int
    logprobs: RankedLogprobs | None
    is_valid: bool


@dataclass(frozen=True)
class ScoredToken:
    """A prompt token of a request with its log-probability given the tokens before it."""

    request: Request
    token_id: int
    logprobs: RankedLogprobs


@dataclass(frozen=True)
class PrefillResult:
    sampled: list[SampledToken]
    scored: list[ScoredToken]  # in order of position for each request


class ModelRunner:
    """Owns no request state: everything comes with the scheduled step."""

    def __init__(self, model: HybridModel, memory: EngineMemory, *, chunk_size: int = DEFAULT_CHUNK_SIZE) -> None:
        self.model = model
        self.memory = memory
        self.chunk_size = chunk_size
        self.num_prefill_forwards = 0
        self.num_decode_forwards = 0

    def prepare_states(self, admissions: Sequence[Admission]) -> None:
        """Fills working slots before their first forward: one batched copy from the tree's, one batched clear."""
        copied = [admission for admission in admissions if admission.copied_from is not None]
        cleared = [admission for admission in admissions if admission.copied_from is None]
        if copied:
            self.memory.state_pool.copy(
                self._indices([admission.copied_from or 0 for admission in copied]), self._working_slots(copied)
            )
        if cleared:
            self.memory.state_pool.clear(self._working_slots(cleared))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> PrefillResult:
        """One forward over all chunks. Writes their KV, the working slots and the checkpoints' slots."""
        batch = build_prefill(chunks, self.memory.table, chunk_size=self.chunk_size, device=self.model.device)
        self.num_prefill_forwards += 1
        logits_MV = self.model.prefill(batch.inputs, self.memory.step_memory)
        scored: list[ScoredToken] = []
        for span in batch.scored:
            token_ids = span.request.tokens[span.start + 1 : span.stop + 1].tolist()
            rows = slice(span.first_row, span.first_row + len(token_ids))
            num_logprobs = span.request.params.prompt_logprobs or 0
            gathered = gather_logprobs(logits_MV[rows], self._indices(token_ids), num_logprobs)
            ranked = _ranked(gathered, [num_logprobs] * len(token_ids))
            scored.extend(
                ScoredToken(span.request, token_id, logprobs)
                for token_id, logprobs in zip(token_ids, ranked, strict=True)
            )
        return PrefillResult(self._sample(logits_MV[batch.sampled_rows_N], batch.sampled), scored)

    def decode(self, requests: Sequence[Request]) -> list[SampledToken]:
        """One forward over one token of each request. Writes its KV and updates the working slot in place."""
        inputs = build_decode(requests, self.memory.table, device=self.model.device)
        self.num_decode_forwards += 1
        return self._sample(self.model.decode(inputs, self.memory.step_memory), requests)

    def _sample(self, logits_BV: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        if not requests:
            return []
        rows = [_sampling_row(request) for request in requests]
        inputs = SamplingInputs.build(rows, logits_BV.shape[-1], logits_BV.device)
        result = sample(logits_BV, inputs)
        is_valid = (~logits_BV.isnan().any(dim=-1)).tolist()
        logprobs: list[RankedLogprobs | None] = [None] * len(requests)
        if result.logprobs is not None:
            wanted = [request.params.logprobs for request in requests]
            ranked = _ranked(result.logprobs, [count or 0 for count in wanted])
            logprobs = [entry if count is not None else None for entry, count in zip(ranked, wanted, strict=True)]
        return [
            SampledToken(*fields)
            for fields in zip(requests, result.token_ids_B.tolist(), logprobs, is_valid, strict=True)
        ]

    def _working_slots(self, admissions: Sequence[Admission]) -> Tensor:
        return self._indices([admission.request.resident.working_slot for admission in admissions])

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.model.device)


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
        position=request.num_tokens,
        prompt_token_ids=request.tokens.prompt,
        output_token_ids=request.tokens.output,
        forbidden_token_ids=request.forbidden_token_ids,
    )


def _ranked(gathered: GatheredLogprobs, counts: Sequence[int]) -> list[RankedLogprobs]:
    """Per row, with the `counts[row]` most likely tokens."""
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

"""Runs the forwards of a step on the device and reads back what the host needs.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.engine.batches import ScoredSpan, build_decode, build_prefill
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE
from hybrid_runtime.sampling import GatheredLogprobs, SamplingInputs, SamplingRow, gather_logprobs, sample
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Admission
from hybrid_runtime.scheduling.scheduler import DecodeRow, PrefillChunk


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

    def prefill(self, chunks: Sequence[PrefillChunk]) -> ForwardResult:
        """One forward over all chunks. Writes their KV, the working slots and the checkpoints' slots.

        The logits behind a chunk's last token tell whether the chunk is sound, even where no token is sampled from
        them: it has seen all the KV and the state that may be kept.
        """
        batch = build_prefill(chunks, self.memory.table, chunk_size=self.chunk_size, device=self.model.device)
        self.num_prefill_forwards += 1
        with self._autocast_off():
            logits_MV = self.model.prefill(batch.inputs, self.memory.step_memory)
        scored = [token for span in batch.scored for token in self._score(logits_MV, span)]
        logits_SV = logits_MV[batch.last_rows_S]
        invalid = _find_invalid(logits_SV, [chunk.request for chunk in chunks])
        places = [
            place
            for place, chunk in enumerate(chunks)
            if chunk.is_last and not chunk.request.is_prefill_only and chunk.request not in invalid
        ]
        sampled = self._sample(logits_SV[self._indices(places)], [chunks[place].request for place in places])
        return ForwardResult(sampled, [token for token in scored if token.request not in invalid], invalid)

    def decode(self, rows: Sequence[DecodeRow]) -> ForwardResult:
        """One forward over one token of each request. Writes its KV and updates the working slot in place.

        The checkpoints that are due get copies of the updated states, all in one batch.
        """
        requests = [row.request for row in rows]
        inputs = build_decode(requests, self.memory.table, device=self.model.device)
        self.num_decode_forwards += 1
        with self._autocast_off():
            logits_BV = self.model.decode(inputs, self.memory.step_memory)
        due = [(row.request.resident.working_slot, row.checkpoint.state_slot) for row in rows if row.checkpoint]
        if due:
            working_slots, checkpoint_slots = zip(*due, strict=True)
            self.memory.state_pool.copy(self._indices(working_slots), self._indices(checkpoint_slots))
        invalid = _find_invalid(logits_BV, requests)
        places = [place for place, request in enumerate(requests) if not request.is_prefill_only]
        if len(places) < len(requests):
            logits_BV = logits_BV[self._indices(places)]
        tokens = self._sample(logits_BV, [requests[place] for place in places])
        return ForwardResult([token for token in tokens if token.request not in invalid], [], invalid)

    def _score(self, logits_MV: Tensor, span: ScoredSpan) -> list[ScoredToken]:
        token_ids = span.request.tokens[span.start + 1 : span.stop + 1].tolist()
        rows = slice(span.first_row, span.first_row + len(token_ids))
        num_logprobs = span.request.params.prompt_logprobs or 0
        gathered = gather_logprobs(logits_MV[rows], self._indices(token_ids), num_logprobs)
        ranked = _ranked(gathered, [num_logprobs] * len(token_ids))
        return [
            ScoredToken(span.request, token_id, logprobs) for token_id, logprobs in zip(token_ids, ranked, strict=True)
        ]

    def _sample(self, logits_BV: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        if not requests:
            return []
        rows = [_sampling_row(request) for request in requests]
        result = sample(logits_BV, SamplingInputs.build(rows, logits_BV.shape[-1], logits_BV.device))
        logprobs: list[RankedLogprobs | None] = [None] * len(requests)
        if result.logprobs is not None:
            wanted = [request.params.logprobs for request in requests]
            ranked = _ranked(result.logprobs, [count or 0 for count in wanted])
            logprobs = [entry if count is not None else None for entry, count in zip(ranked, wanted, strict=True)]
        return [SampledToken(*fields) for fields in zip(requests, result.token_ids_B.tolist(), logprobs, strict=True)]

    def _autocast_off(self) -> torch.autocast:
        """The dtypes are the runtime's business, whatever block of its user's the call stands in."""
        return torch.autocast(self.model.device.type, enabled=False)

    def _working_slots(self, admissions: Sequence[Admission]) -> Tensor:
        return self._indices([admission.request.resident.working_slot for admission in admissions])

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.model.device)


def _find_invalid(logits_BV: Tensor, requests: Sequence[Request]) -> frozenset[Request]:
    is_invalid = (~(logits_BV < torch.inf).all(dim=-1)).tolist()  # NaN and +inf; a token may well be at -inf
    return frozenset(request for request, invalid in zip(requests, is_invalid, strict=True) if invalid)


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

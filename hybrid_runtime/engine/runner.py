"""Runs prepared steps on the device and reads back what the host needs.

Shapes: B rows, S sequences, M tokens whose logits are wanted, V vocabulary, R rows of the request table.
"""

from __future__ import annotations

from dataclasses import dataclass

import nvtx
import torch
from torch import Tensor

from hybrid_runtime.engine.batches import Indices, ScoredSpan, to_device
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.prepared import PreparedDecode, PreparedPrefill, PreparedStep, SampledRows, prepare_step
from hybrid_runtime.engine.results import ForwardResult, RankedLogprobs, SampledToken, ScoredToken, rank_logprobs
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE
from hybrid_runtime.sampling import GatheredLogprobs, SampleResult, SamplingInputs, gather_logprobs, sample
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import ScheduledStep


@dataclass(frozen=True)
class LaunchedForward:
    """The results of one forward, which may still be on their way."""

    requests: tuple[Request, ...]  # [B]
    is_invalid_B: Tensor  # bool
    sampled: SampledRows
    result: SampleResult | None  # of the sampled rows; None: there are none
    scored: tuple[tuple[ScoredSpan, GatheredLogprobs], ...]

    def wait(self) -> ForwardResult:
        """Reads the results back."""
        flags = self.is_invalid_B.tolist()
        invalid = frozenset(request for request, flag in zip(self.requests, flags, strict=True) if flag)
        scored = [token for span, gathered in self.scored for token in _scored_tokens(span, gathered)]
        return ForwardResult(
            [token for token in self._sampled_tokens() if token.request not in invalid],
            [token for token in scored if token.request not in invalid],
            invalid,
        )

    def _sampled_tokens(self) -> list[SampledToken]:
        if self.result is None:
            return []
        requests = self.sampled.requests
        logprobs: list[RankedLogprobs | None] = [None] * len(requests)
        if self.result.logprobs is not None:
            wanted = [request.params.logprobs for request in requests]
            ranked = rank_logprobs(self.result.logprobs, [count or 0 for count in wanted])
            logprobs = [entry if count is not None else None for entry, count in zip(ranked, wanted, strict=True)]
        token_ids = self.result.token_ids_B.tolist()
        return [SampledToken(*fields) for fields in zip(requests, token_ids, logprobs, strict=True)]


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose work has been handed to the device."""

    forwards: tuple[LaunchedForward, ...]

    def wait(self) -> list[ForwardResult]:
        """The results, of the prefill first. Blocks until they are there."""
        return [forward.wait() for forward in self.forwards]


class ModelRunner:
    """Owns no request state: everything comes with the prepared step, but for the token chosen last for each row."""

    def __init__(self, model: HybridModel, memory: EngineMemory, *, chunk_size: int = DEFAULT_CHUNK_SIZE) -> None:
        self.model = model
        self.memory = memory
        self.chunk_size = chunk_size
        self.num_prefill_forwards = 0
        self.num_decode_forwards = 0
        with torch.inference_mode(False):  # as the pools: writable in either mode
            self.last_token_R = torch.zeros(len(memory.table.slots), dtype=torch.int64, device=model.device)

    def prepare(self, step: ScheduledStep) -> PreparedStep:
        """Everything that the device needs for a step. Host only; reads requests and table, which may change then."""
        return prepare_step(step, self.memory.table, copy_table=not self.memory.table_is_shared)

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Hands a step to the device, in the order of its stream: table, working slots, prefill, decode, checkpoints.

        Writes the KV of all tokens, the working slots and the checkpoints' slots. A decode row whose token was not
        known on the host takes the one that the device chose last for it.
        """
        with nvtx.annotate("load"):
            self.memory.load_table(prepared.table_entries)
        with nvtx.annotate("copy"):
            pool = self.memory.state_pool
            if prepared.copies is not None:
                pool.copy(self._indices(prepared.copies.sources), self._indices(prepared.copies.destinations))
            if prepared.clears is not None:
                pool.clear(self._indices(prepared.clears))
        forwards = []
        if prepared.prefill is not None:
            with nvtx.annotate("run.prefill"):
                forwards.append(self._prefill(prepared.prefill))
        if prepared.decode is not None:
            with nvtx.annotate(f"run.decode.b{len(prepared.decode.requests)}"):
                forwards.append(self._decode(prepared.decode))
        return LaunchedStep(tuple(forwards))

    def _prefill(self, prefill: PreparedPrefill) -> LaunchedForward:
        """One forward over all chunks.

        The logits behind a chunk's last token tell whether the chunk is sound, even where no token is sampled from
        them: it has seen all the KV and the state that may be kept.
        """
        batch = prefill.batch
        inputs = batch.to_device(self.model.device, chunk_size=self.chunk_size)
        self.num_prefill_forwards += 1
        with self._autocast_off():
            logits_MV = self.model.prefill(inputs, self.memory.step_memory)
        scored = tuple((span, self._score(logits_MV, span)) for span in batch.scored)
        logits_SV = logits_MV[self._indices(batch.last_rows_S)]
        return self._choose(logits_SV, inputs.request_rows_S, prefill.requests, prefill.sampled, scored)

    def _decode(self, decode: PreparedDecode) -> LaunchedForward:
        """One forward over one token of each row; checkpoints that are due get copies of the updated states."""
        inputs = decode.batch.to_device(self.model.device, self.last_token_R)
        self.num_decode_forwards += 1
        with self._autocast_off():
            logits_BV = self.model.decode(inputs, self.memory.step_memory)
        due = decode.checkpoints
        if due is not None:
            self.memory.state_pool.copy(self._indices(due.sources), self._indices(due.destinations))
        return self._choose(logits_BV, inputs.request_rows_B, decode.requests, decode.sampled, ())

    def _choose(
        self,
        logits_BV: Tensor,
        request_rows_B: Tensor,
        requests: tuple[Request, ...],
        sampled: SampledRows,
        scored: tuple[tuple[ScoredSpan, GatheredLogprobs], ...],
    ) -> LaunchedForward:
        """Samples the rows that want a token, and keeps the tokens on the device for the next step."""
        is_invalid_B = ~(logits_BV < torch.inf).all(dim=-1)  # NaN and +inf; a token may well be at -inf
        result = None
        if sampled.places:
            if len(sampled.places) < len(requests):
                places = torch.tensor(sampled.places, device=logits_BV.device)
                logits_BV, request_rows_B = logits_BV[places], request_rows_B[places]
            inputs = SamplingInputs.build(sampled.sampling, logits_BV.shape[-1], logits_BV.device)
            result = sample(logits_BV, inputs)
            self.last_token_R.index_put_((request_rows_B,), result.token_ids_B)
        return LaunchedForward(requests, is_invalid_B, sampled, result, scored)

    def _score(self, logits_MV: Tensor, span: ScoredSpan) -> GatheredLogprobs:
        rows = slice(span.first_row, span.first_row + len(span.token_ids))
        token_ids = torch.tensor(span.token_ids, device=logits_MV.device)
        return gather_logprobs(logits_MV[rows], token_ids, _num_prompt_logprobs(span))

    def _autocast_off(self) -> torch.autocast:
        """The dtypes are the runtime's business, whatever block of its user's the call stands in."""
        return torch.autocast(self.model.device.type, enabled=False)

    def _indices(self, values: Indices) -> Tensor:
        return to_device(values, self.model.device)


def _num_prompt_logprobs(span: ScoredSpan) -> int:
    return span.request.params.prompt_logprobs or 0


def _scored_tokens(span: ScoredSpan, gathered: GatheredLogprobs) -> list[ScoredToken]:
    ranked = rank_logprobs(gathered, [_num_prompt_logprobs(span)] * len(span.token_ids))
    return [ScoredToken(span.request, *fields) for fields in zip(span.token_ids, ranked, strict=True)]

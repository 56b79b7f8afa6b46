"""Turns a scheduled step into the tensors of the model's two forwards.

Shapes: L tokens of all sequences of a prefill, S its sequences, R states it returns, M tokens whose logits are wanted,
B rows of a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.ops.ragged import RaggedLayout
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import PrefillChunk


@dataclass(frozen=True)
class PrefillBatch:
    """Inputs of a prefill, and which of its M rows of logits are for what."""

    inputs: PrefillInputs
    last_rows_S: Tensor  # of the last token of each chunk; int64
    scored: tuple[ScoredSpan, ...]  # prompt tokens whose logprobs are wanted


@dataclass(frozen=True)
class ScoredSpan:
    """Rows `[first_row, first_row + stop - start)` of logits follow the prompt tokens `[start, stop)` of a request."""

    request: Request
    start: int
    stop: int
    first_row: int


def build_prefill(
    chunks: Sequence[PrefillChunk], table: RequestTable, *, chunk_size: int, device: torch.device
) -> PrefillBatch:
    """Lays the chunks one behind the other. Their rows in `table` already name the slots of all their tokens."""
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    positions: list[list[int]] = []
    state_slots: list[int] = []
    for chunk, length in zip(chunks, lengths, strict=True):
        positions.append([*(checkpoint.length - chunk.start for checkpoint in chunk.checkpoints), length])
        state_slots.extend(checkpoint.state_slot for checkpoint in chunk.checkpoints)
        state_slots.append(chunk.request.resident.working_slot)

    logits_tokens: list[int] = []
    last_rows: list[int] = []
    scored: list[ScoredSpan] = []
    begin = 0
    for chunk, length in zip(chunks, lengths, strict=True):
        if chunk.request.wants_prompt_logprobs:
            # The logits of the last prompt token score no prompt token.
            start = max(chunk.start, chunk.request.num_prompt_logits_read)
            stop = min(chunk.stop, chunk.request.tail_position)
            if start < stop:
                scored.append(ScoredSpan(chunk.request, start, stop, len(logits_tokens)))
                logits_tokens.extend(range(begin + start - chunk.start, begin + stop - chunk.start))
        last_rows.append(len(logits_tokens))
        logits_tokens.append(begin + length - 1)
        begin += length

    def indices(values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)

    inputs = PrefillInputs(
        layout=RaggedLayout.build(lengths, positions, chunk_size=chunk_size, device=device),
        token_ids_L=indices(np.concatenate([chunk.request.tokens[chunk.start : chunk.stop] for chunk in chunks])),
        positions_L=indices(np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])),
        kv_slots_L=indices(
            np.concatenate([table.slots[chunk.request.resident.row, chunk.start : chunk.stop] for chunk in chunks])
        ),
        request_rows_S=indices([chunk.request.resident.row for chunk in chunks]),
        context_lens=tuple(chunk.stop for chunk in chunks),
        working_slots_S=indices([chunk.request.resident.working_slot for chunk in chunks]),
        state_slots_R=indices(state_slots),
        logits_tokens_M=indices(logits_tokens),
    )
    return PrefillBatch(inputs, indices(last_rows), tuple(scored))


def build_decode(requests: Sequence[Request], table: RequestTable, *, device: torch.device) -> DecodeInputs:
    """One row per request: its only uncomputed token."""
    rows = np.array([request.resident.row for request in requests], dtype=np.int64)
    positions = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)

    def indices(values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)

    return DecodeInputs(
        token_ids_B=indices([request.tokens.last for request in requests]),
        positions_B=indices(positions),
        kv_slots_B=indices(table.slots[rows, positions]),
        request_rows_B=indices(rows),
        context_lens_B=indices(positions + 1),
        max_context_len=int(positions.max()) + 1,
        working_slots_B=indices([request.resident.working_slot for request in requests]),
    )

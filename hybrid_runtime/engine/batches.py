"""What a scheduled step's two forwards read, as host arrays, and the device tensors made of them.

Shapes: L tokens of all sequences of a prefill, S its sequences, R states it returns, M tokens whose logits are wanted,
B rows of a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.graphs.decode_runner import MODEL_FIELDS
from hybrid_runtime.graphs.step_inputs import IN_FLIGHT, PrefillInputs
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.ragged import RaggedLayout
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import PrefillChunk

Indices = NDArray[np.int64]
_NO_TOP_K = 2**62  # more tokens than any vocabulary has


@dataclass(frozen=True)
class ScoredSpan:
    """Rows `[first_row, first_row + len(token_ids))` of logits score prompt tokens of a request, in order."""

    request: Request
    token_ids: tuple[int, ...]
    first_row: int


@dataclass(frozen=True)
class PrefillBatch:
    """Inputs of a prefill, and which of its M rows of logits are for what."""

    lengths: tuple[int, ...]  # [S] tokens of each sequence
    state_positions: tuple[tuple[int, ...], ...]  # [S] where in it states are wanted
    token_ids_L: Indices
    positions_L: Indices
    kv_slots_L: Indices
    request_rows_S: Indices
    context_lens_S: Indices
    working_slots_S: Indices
    state_slots_R: Indices
    logits_tokens_M: Indices
    logits_rows_M: Indices
    draw_FM: Indices  # what `graphs.step_inputs.draw_inputs` takes
    last_rows_S: Indices  # which of the M rows is that of a chunk's last token
    scored: tuple[ScoredSpan, ...]  # prompt tokens whose logprobs are wanted

    def to_device(self, device: torch.device, *, chunk_size: int) -> PrefillInputs:
        """The tensors that the model reads."""
        return PrefillInputs(
            layout=RaggedLayout.build(self.lengths, self.state_positions, chunk_size=chunk_size, device=device),
            token_ids_L=to_device(self.token_ids_L, device),
            positions_L=to_device(self.positions_L, device),
            kv_slots_L=to_device(self.kv_slots_L, device),
            request_rows_S=to_device(self.request_rows_S, device),
            context_lens_S=torch.from_numpy(self.context_lens_S),
            working_slots_S=to_device(self.working_slots_S, device),
            state_slots_R=to_device(self.state_slots_R, device),
            logits_tokens_M=to_device(self.logits_tokens_M, device),
            logits_rows_M=to_device(self.logits_rows_M, device),
        )


def build_prefill(chunks: Sequence[PrefillChunk], table: RequestTable) -> PrefillBatch:
    """Lays the chunks one behind the other. Their rows in `table` already name the slots of all their tokens."""
    state_positions: list[tuple[int, ...]] = []
    state_slots: list[int] = []
    logits_tokens: list[int] = []
    logits_rows: list[int] = []
    last_rows: list[int] = []
    scored: list[ScoredSpan] = []
    begin = 0
    for chunk in chunks:
        length = chunk.stop - chunk.start
        state_positions.append((*(checkpoint.length - chunk.start for checkpoint in chunk.checkpoints), length))
        state_slots.extend(checkpoint.state_slot for checkpoint in chunk.checkpoints)
        state_slots.append(chunk.request.resident.working_slot)
        span = _scored_span(chunk, first_row=len(logits_tokens))
        if span is not None:
            first = begin + max(chunk.start, chunk.request.num_prompt_logits_read) - chunk.start
            logits_tokens.extend(range(first, first + len(span.token_ids)))
            logits_rows.extend([0] * len(span.token_ids))
            scored.append(span)
        last_rows.append(len(logits_tokens))
        logits_tokens.append(begin + length - 1)
        logits_rows.append(chunk.request.resident.row)
        begin += length
    rows = [chunk.request.resident.row for chunk in chunks]
    draw_FM = np.zeros((len(DrawInputs._fields), len(logits_tokens)), dtype=np.int64)  # greedy
    draw_FM[:, last_rows] = build_draw([chunk.request for chunk in chunks], [chunk.stop for chunk in chunks])
    return PrefillBatch(
        lengths=tuple(chunk.stop - chunk.start for chunk in chunks),
        state_positions=tuple(state_positions),
        token_ids_L=_indices(np.concatenate([chunk.request.tokens[chunk.start : chunk.stop] for chunk in chunks])),
        positions_L=np.concatenate([np.arange(chunk.start, chunk.stop, dtype=np.int64) for chunk in chunks]),
        kv_slots_L=_indices(
            np.concatenate([table.slots[row, c.start : c.stop] for row, c in zip(rows, chunks, strict=True)])
        ),
        request_rows_S=_indices(rows),
        context_lens_S=_indices([chunk.stop for chunk in chunks]),
        working_slots_S=_indices([chunk.request.resident.working_slot for chunk in chunks]),
        state_slots_R=_indices(state_slots),
        logits_tokens_M=_indices(logits_tokens),
        logits_rows_M=_indices(logits_rows),
        draw_FM=draw_FM,
        last_rows_S=_indices(last_rows),
        scored=tuple(scored),
    )


def _scored_span(chunk: PrefillChunk, first_row: int) -> ScoredSpan | None:
    """The prompt tokens that the logits of this chunk score, if that is wanted and they have not been read yet."""
    request = chunk.request
    if not request.wants_prompt_logprobs:
        return None
    # The logits of the last prompt token score no prompt token.
    start, stop = max(chunk.start, request.num_prompt_logits_read), min(chunk.stop, request.tail_position)
    if start >= stop:
        return None
    return ScoredSpan(request, tuple(request.tokens[start + 1 : stop + 1].tolist()), first_row)


def build_decode(requests: Sequence[Request], table: RequestTable) -> Indices:
    """What `DecodeRunner.run` takes, `[fields, B]`: per request the first token that is not computed."""
    rows = _indices([request.resident.row for request in requests])
    positions = _indices([request.num_computed_tokens for request in requests])
    fields: dict[str, Indices] = {
        "token_ids_B": _indices([_next_input(request) for request in requests]),
        "positions_B": positions,
        "kv_slots_B": _indices(table.slots[rows, positions]),
        "request_rows_B": rows,
        "context_lens_B": positions + 1,
        "working_slots_B": _indices([request.resident.working_slot for request in requests]),
    }
    draw_FB = build_draw(requests, [request.num_computed_tokens + 1 for request in requests])
    return np.vstack([*(fields[name] for name in MODEL_FIELDS), draw_FB])


def build_draw(requests: Sequence[Request], positions: Sequence[int]) -> Indices:
    """What `graphs.step_inputs.draw_inputs` takes, `[fields, B]`; `positions[i]` is that of the token to be chosen."""
    of_floats = [(params.temperature, params.min_p, params.top_p) for params in (r.params for r in requests)]
    temperature_B, min_p_B, top_p_B = np.array(of_floats, dtype=np.float64).T.copy().view(np.int64)
    top_ks = [min(top_k, _NO_TOP_K) if (top_k := request.params.top_k) > 0 else _NO_TOP_K for request in requests]
    fields: dict[str, Sequence[int] | Indices] = {
        "temperature_B": temperature_B,
        "min_p_B": min_p_B,
        "top_k_B": top_ks,
        "top_p_B": top_p_B,
        "seeds_B": [request.seed for request in requests],
        "sample_indices_B": [request.sample_index for request in requests],
        "positions_B": positions,
    }
    return np.array([fields[name] for name in DrawInputs._fields], dtype=np.int64)


def _next_input(request: Request) -> int:
    return request.tokens.last if request.num_computed_tokens < request.num_tokens else IN_FLIGHT


def _indices(values: Sequence[int] | np.ndarray) -> Indices:
    return np.asarray(values, dtype=np.int64)


def to_device(values: Indices, device: torch.device) -> Tensor:
    """int64 indices as a tensor; on a CPU it shares their memory."""
    return torch.from_numpy(values).to(device)

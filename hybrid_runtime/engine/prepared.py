"""A scheduled step as host data. Once it is prepared, nothing of its requests or of the request table is read again.

So the scheduler may go on while the step runs.

Shapes: n pairs of state slots, B rows of a decode, S sequences of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.engine.batches import Indices, PrefillBatch, build_decode, build_prefill
from hybrid_runtime.engine.verify_batch import PreparedVerify, prepare_verify
from hybrid_runtime.memory.request_table import RequestTable, TableEntries
from hybrid_runtime.sampling import SamplingRow
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Admission
from hybrid_runtime.scheduling.scheduler import DecodeRow, PrefillChunk, ScheduledStep, VerifyRow


@dataclass(frozen=True)
class SlotCopies:
    """State slots to be copied: `destinations[i]` gets what `sources[i]` holds. int64 `[n]` each."""

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]


@dataclass(frozen=True)
class SampledRows:
    """The rows of a forward that choose a next token: which ones, for whom, and how."""

    places: tuple[int, ...]  # of the forward's sequences or rows
    requests: tuple[Request, ...]
    sampling: tuple[SamplingRow, ...] | None  # None: the tokens that the step draws are all that is wanted


@dataclass(frozen=True)
class PreparedPrefill:
    requests: tuple[Request, ...]  # [S]
    batch: PrefillBatch
    sampled: SampledRows


@dataclass(frozen=True)
class PreparedDecode:
    requests: tuple[Request, ...]  # [B]
    fields_FB: Indices  # what `graphs.decode_runner.DecodeRunner.run` takes
    checkpoints: SlotCopies | None
    sampled: SampledRows


@dataclass(frozen=True)
class PreparedStep:
    """All that the device needs for one step, in the order in which it is done."""

    table_entries: TableEntries | None
    copies: SlotCopies | None
    clears: NDArray[np.int64] | None
    prefill: PreparedPrefill | None
    decode: PreparedDecode | None
    verify: PreparedVerify | None


def prepare_step(
    step: ScheduledStep, table: RequestTable, *, copy_table: bool, tree_size: Callable[[int], int]
) -> PreparedStep:
    """Reads off requests and table what a step needs. Call it before the step's tokens count as computed.

    `copy_table`: whether the device has a copy of the table of its own, which needs what was written since.
    `tree_size`: how many nodes the trees of a verify have that has a draft of so many with its root.
    """
    if not copy_table:
        table.forget_writes()
    copied, cleared = _working_slots(step.admissions)
    return PreparedStep(
        table_entries=table.take_writes(),
        copies=copied,
        clears=cleared,
        prefill=_prepare_prefill(step.prefill, table) if step.prefill else None,
        decode=_prepare_decode(step.decode, table) if step.decode else None,
        verify=_prepare_verify(step.verify, table, tree_size) if step.verify else None,
    )


def _prepare_verify(rows: Sequence[VerifyRow], table: RequestTable, tree_size: Callable[[int], int]) -> PreparedVerify:
    return prepare_verify(rows, table, tree_size(1 + max(len(row.draft) for row in rows)))


def _working_slots(admissions: Sequence[Admission]) -> tuple[SlotCopies | None, NDArray[np.int64] | None]:
    """What fills the working slots before their first forward: copies of the tree's, and zeros."""
    copied = [(a.copied_from, a.request.resident.working_slot) for a in admissions if a.copied_from is not None]
    cleared = [a.request.resident.working_slot for a in admissions if a.copied_from is None]
    return _slot_copies(copied), np.array(cleared, dtype=np.int64) if cleared else None


def _slot_copies(pairs: Sequence[tuple[int, int]]) -> SlotCopies | None:
    if not pairs:
        return None
    sources, destinations = np.array(pairs, dtype=np.int64).T.copy()
    return SlotCopies(sources, destinations)


def _prepare_prefill(chunks: Sequence[PrefillChunk], table: RequestTable) -> PreparedPrefill:
    places = [place for place, c in enumerate(chunks) if c.is_last and not c.request.is_prefill_only]
    requests = tuple(chunk.request for chunk in chunks)
    positions = [chunk.stop for chunk in chunks]
    return PreparedPrefill(requests, build_prefill(chunks, table), _sampled_rows(requests, positions, places))


def _prepare_decode(rows: Sequence[DecodeRow], table: RequestTable) -> PreparedDecode:
    requests = tuple(row.request for row in rows)
    due = [(row.request.resident.working_slot, row.checkpoint.state_slot) for row in rows if row.checkpoint]
    places = [place for place, request in enumerate(requests) if not request.is_prefill_only]
    positions = [request.num_computed_tokens + 1 for request in requests]
    return PreparedDecode(
        requests, build_decode(requests, table), _slot_copies(due), _sampled_rows(requests, positions, places)
    )


def _sampled_rows(requests: Sequence[Request], positions: Sequence[int], places: Sequence[int]) -> SampledRows:
    """`positions[i]` is the place in its text of the token that `requests[i]` would choose."""
    chosen = tuple(requests[place] for place in places)
    if all(request.params.only_draws and not request.forbidden_token_ids for request in chosen):
        return SampledRows(tuple(places), chosen, None)
    sampling = tuple(
        SamplingRow(
            params=request.params,
            seed=request.seed,
            sample_index=request.sample_index,
            position=positions[place],
            prompt_token_ids=request.tokens.prompt,
            output_token_ids=request.tokens.output,
            forbidden_token_ids=request.forbidden_token_ids,
        )
        for place, request in zip(places, chosen, strict=True)
    )
    return SampledRows(tuple(places), chosen, sampling)

"""How a request moves into the pools, keeps checkpoints in the tree while it runs, and moves out again.

Slots change their owner only here and in the tree; DESIGN.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint, InsertResult, PrefixMatch
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.scheduling.request import PrefixHit, Request, RequestStatus, Residence
from hybrid_runtime.scheduling.supply import SlotSupply

NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Admission:
    """What must happen to a new resident's working slot before its first forward: a copy, or else a clear."""

    request: Request
    copied_from: int | None  # the tree's state slot that it resumes from


@dataclass
class LookupCounts:
    """What looking for prefixes has brought so far; each row counts once, at its first admission."""

    num_requests: int = 0
    num_hits: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, request: Request, hit: PrefixHit) -> None:
        self.num_requests += 1
        self.num_hits += hit.num_cached_tokens > 0
        self.num_prompt_tokens += request.tokens.prompt_len
        self.num_cached_tokens += hit.num_cached_tokens


class Residency:
    """Moves requests in and out of the pools. With `enabled=False` nothing is looked up and nothing is kept."""

    def __init__(self, supply: SlotSupply, table: RequestTable, *, enabled: bool) -> None:
        self.supply = supply
        self.table = table
        self.enabled = enabled
        self.num_kept_checkpoints: Counter[str] = Counter()
        self.num_skipped_checkpoints = 0
        self.lookups = LookupCounts()

    @property
    def cache(self) -> RadixCache:
        return self.supply.cache

    def admit(self, request: Request, *, headroom: int) -> Admission | None:
        """Makes a waiting request resident: a row, a working slot, and KV slots for all tokens it has.

        What is matched is locked. Returns None, with nothing changed, where the pools cannot give that and leave
        `headroom` KV slots free or evictable.
        """
        return self._move_in(request, self.cache.match(self._lookup_key(request)), headroom)

    def admit_unmatched(self, request: Request) -> Admission | None:
        """As `admit`, but resumes from nothing, so that what the match would lock can be evicted for the request."""
        return self._move_in(request, self.cache.match(NO_TOKENS), headroom=0)

    def extend(self, request: Request, kv_slots: NDArray[np.int32]) -> None:
        """Appends KV slots, which the request then owns, to its row."""
        residence = request.resident
        self.table.write(residence.row, residence.num_kv_slots, kv_slots)
        residence.num_kv_slots += len(kv_slots)

    def take_checkpoint_slot(self) -> StateSlot | None:
        """A state slot for a checkpoint that is due; None, and counted as skipped, if there is none to be had."""
        if not self.supply.can_supply(0, 1):
            self.num_skipped_checkpoints += 1
            return None
        return StateSlot(int(self.supply.take_states(1)[0]))

    def keep_checkpoint(self, request: Request, checkpoint: Checkpoint) -> None:
        """Gives the tree a running request's state at `checkpoint.length`, with the KV up to there.

        The checkpoint's slot must hold that state; it is the tree's afterwards. The request's row then names the
        tree's slots up to that length, and the request's lock moves there.
        """
        residence = request.resident
        result = self._insert(request, checkpoint)
        receipt = self.cache.lock_kv(result.node)
        self.supply.release(self.cache.unlock(residence.receipt))
        residence.receipt = receipt
        replaced = slice(residence.protected_length, result.kv_length)
        self.table.write(residence.row, replaced.start, result.kv_slots[replaced])
        residence.protected_length = result.kv_length

    def donate(self, request: Request, origin: str) -> None:
        """Moves a request out and leaves what it computed, with its working slot as a checkpoint, in the tree."""
        residence = request.resident
        if not self.enabled:
            self.vacate(request)
            return
        assert request.num_computed_tokens > 0, "it was admitted and has not run: its working slot holds nothing"
        result = self._insert(request, Checkpoint(request.num_computed_tokens, residence.working_slot, origin))
        self._move_out(request, first_own=result.kv_length)

    def vacate(self, request: Request) -> None:
        """Moves a request out and leaves nothing of its own: for a working slot that is not worth or fit to keep."""
        self.supply.release_states([request.resident.working_slot])
        self._move_out(request, first_own=request.resident.protected_length)

    def _lookup_key(self, request: Request) -> NDArray[np.int32]:
        return request.matchable_tokens if self.enabled else NO_TOKENS

    def _move_in(self, request: Request, match: PrefixMatch, headroom: int) -> Admission | None:
        receipt = self.cache.lock(match.node)
        num_own = request.num_tokens - match.state_length
        if not self.supply.can_supply(num_own + headroom, 1):
            self.supply.release(self.cache.unlock(receipt))
            return None
        request.residence = Residence(
            row=self.table.allocate_row(),
            working_slot=StateSlot(int(self.supply.take_states(1)[0])),
            receipt=receipt,
            protected_length=match.state_length,
            num_kv_slots=match.state_length,
        )
        self.table.write(request.residence.row, 0, match.kv_slots)
        self.extend(request, self.supply.take_kv(num_own))
        request.num_computed_tokens = match.state_length
        request.status = RequestStatus.RUNNING
        if request.prefix_hit is None:
            request.prefix_hit = self._describe(request, match)
            if self.enabled:
                self.lookups.add(request, request.prefix_hit)
        return Admission(request, match.state_slot)

    def _insert(self, request: Request, checkpoint: Checkpoint) -> InsertResult:
        residence = request.resident
        result = self.cache.insert(
            request.tokens[: checkpoint.length],
            self.table.slots[residence.row, : checkpoint.length],
            [checkpoint],
            protected_length=residence.protected_length,
        )
        self.supply.release_kv(result.duplicate_kv_slots)
        self.supply.release_states(result.duplicate_state_slots)
        if not len(result.duplicate_state_slots):
            self.num_kept_checkpoints[checkpoint.origin] += 1
        return result

    def _move_out(self, request: Request, first_own: int) -> None:
        """Releases the KV slots from position `first_own` on, the row and the lock."""
        residence = request.resident
        self.supply.release_kv(self.table.slots[residence.row, first_own : residence.num_kv_slots])
        self.supply.release(self.cache.unlock(residence.receipt))
        self.table.release_row(residence.row)
        request.residence = None
        request.num_computed_tokens = 0

    def _describe(self, request: Request, match: PrefixMatch) -> PrefixHit:
        return PrefixHit(
            num_cached_tokens=match.state_length,
            num_kv_matched_tokens=match.kv_length,
            checkpoint_origin=match.origin,
            cache_miss_reason=None if match.state_length else self._miss_reason(request, match),
        )

    def _miss_reason(self, request: Request, match: PrefixMatch) -> str:
        if not self.enabled:
            return "disabled"
        if request.wants_prompt_logprobs:
            return "prompt_logprobs"
        if request.tail_position == 0:
            return "too_short"
        return "no_state_on_path" if match.kv_length else "cold"

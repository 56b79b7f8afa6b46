"""How a request moves into the pools, keeps checkpoints in the tree while it runs, and moves out again.

Slots change their owner only here and in the tree; DESIGN.md has the rules.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint, InsertResult, PrefixMatch
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.scheduling.host_tier import HostTier
from hybrid_runtime.scheduling.lookups import LookupCounts, describe_lookup
from hybrid_runtime.scheduling.paths import evictable_at
from hybrid_runtime.scheduling.placement import CheckpointPolicy, due_in_prompt
from hybrid_runtime.scheduling.request import MAX_LOST_STATES, Request, RequestStatus, Residence
from hybrid_runtime.scheduling.supply import SlotSupply

_LOGGER = logging.getLogger(__name__)
NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Admission:
    """What must happen to a new resident's working slot before its first forward: a copy, or else a clear."""

    request: Request
    copied_from: int | None  # the tree's state slot that it resumes from


class LaggingStates(Protocol):
    """Working slots and periodic checkpoints whose states are yet to be written, after drafts were accepted."""

    def catch_up(self) -> None:
        """Has all of them written, by the steps that follow in the stream. What fails about it gets out."""

    def is_lost(self, row: int) -> bool:
        """Whether writing those of a row of the request table has failed: nobody must read them."""

    def forget(self, row: int) -> None:
        """Leaves those of a row of the request table unwritten for good."""


class Residency:
    """Moves requests in and out of the pools. With `enabled=False` nothing is looked up and nothing is kept."""

    def __init__(
        self,
        supply: SlotSupply,
        table: RequestTable,
        *,
        enabled: bool,
        policy: CheckpointPolicy | None = None,
        tier: HostTier | None = None,
    ) -> None:
        """`tier`: keeps what `supply` evicts, if there is one."""
        self.supply = supply
        self.tier = tier
        self.table = table
        self.enabled = enabled
        self.policy = policy or CheckpointPolicy()
        self.lagging: LaggingStates | None = None
        self.num_kept_checkpoints: Counter[str] = Counter()
        self.num_skipped_checkpoints: Counter[str] = Counter()
        self.lookups = LookupCounts()

    @property
    def cache(self) -> RadixCache:
        return self.supply.cache

    def admit(self, request: Request, *, headroom: int) -> Admission | None:
        """Makes a waiting request resident: a row, a working slot, and KV slots for all tokens it has.

        What is matched is locked; if a second tier has much more, that is brought back first. Returns None, with
        nothing changed, where the pools cannot give that and leave `headroom` KV slots free or evictable.
        """
        if self.tier is not None:
            self.tier.restore(self._lookup_key(request), num_kv=request.num_tokens + headroom)
        found = self.match(request)
        return self._move_in(request, found, found, headroom)

    def match(self, request: Request) -> PrefixMatch:
        """What the cache has for a request that waits. Read-only.

        A warm-up goes no further than to the first of its checkpoints that the tree does not have.
        """
        tokens = self._lookup_key(request)
        match = self.cache.match(tokens)
        for length in sorted(request.params.checkpoint_positions) if request.is_prefill_only else ():
            beginning = self.cache.match(tokens[: length + 1])
            if beginning.state_length < min(length, match.state_length):
                return beginning
        return match

    def reachable_length(self, request: Request) -> int:
        """Tokens that a request that waits could skip, if there is room. Read-only."""
        if self.tier is None:
            return self.match(request).state_length
        return self.tier.reachable_length(self._lookup_key(request))

    def admit_unmatched(self, request: Request) -> Admission | None:
        """As `admit`, but resumes from nothing, so that what the match would lock can be evicted for the request."""
        return self._move_in(request, self.match(request), self.cache.match(NO_TOKENS), headroom=0)

    def extend(self, request: Request, kv_slots: NDArray[np.int32]) -> None:
        """Appends KV slots, which the request then owns, to its row."""
        residence = request.resident
        self.table.write(residence.row, residence.num_kv_slots, kv_slots)
        residence.num_kv_slots += len(kv_slots)

    def extend_each(self, requests: Sequence[Request], kv_slots: NDArray[np.int32]) -> None:
        """Appends one KV slot, which the request then owns, to the row of each."""
        residences = [request.resident for request in requests]
        self.table.write_each([r.row for r in residences], [r.num_kv_slots for r in residences], kv_slots)
        for residence in residences:
            residence.num_kv_slots += 1

    def keep_kv(self, paths: Sequence[tuple[Request, NDArray[np.int64]]]) -> None:
        """After a verify: the KV slots of the accepted nodes stay, in path order, and the other nodes' are free again.

        The nodes' slots are those from the first token on that is not computed. A path has a root at least.
        """
        rejected = [NO_TOKENS]
        for request, nodes in paths:
            residence, first = request.resident, request.num_computed_tokens
            slots = self.table.slots[residence.row, first : residence.num_kv_slots].copy()
            is_rejected = np.ones(len(slots), dtype=bool)
            is_rejected[nodes] = False
            if nodes[-1] >= len(nodes):  # else they are the first ones: their numbers grow along the path
                self.table.write(residence.row, first, slots[nodes])
            residence.num_kv_slots = first + len(nodes)
            rejected.append(slots[is_rejected])
        self.supply.release_kv(np.concatenate(rejected)[::-1])  # to be handed out in their order

    def take_checkpoint_slot(self, origin: str) -> StateSlot | None:
        """A state slot for a checkpoint that is due; None, and counted as skipped, if none is available."""
        try:
            return StateSlot(int(self.supply.take_states(1)[0]))
        except PoolExhausted:
            self.num_skipped_checkpoints[origin] += 1
            return None

    def track(self, request: Request, length: int) -> Checkpoint | None:
        """The periodic checkpoint of a request that the next step is to write; None, and counted, if there is no slot.

        It takes the place of the oldest one, never of one that a step in flight is writing. Where there is another slot
        the latest one stays: the request may turn out to have ended with the step in flight.
        """
        tracks = request.resident.tracks
        if not tracks or (len(tracks) < self.policy.num_track_slots and self.supply.can_supply(0, 1)):
            slot = self.take_checkpoint_slot("track")
        else:
            slot = None
            if tracks[0].length <= request.num_landed_tokens:
                slot = tracks.pop(0).state_slot
            else:
                self.num_skipped_checkpoints["track"] += 1
        if slot is None:
            return None
        tracks.append(Checkpoint(length, slot, "track"))
        return tracks[-1]

    def track_within(self, request: Request, start: int, stop: int) -> Checkpoint | None:
        """The periodic checkpoint of a request that has just computed tokens `[start, stop)` of its output.

        Of several boundaries on the way the last. None: there is none, or no slot for it.
        """
        interval = self.policy.track_interval
        if not self.enabled or interval is None:
            return None
        boundary = stop - stop % interval
        return self.track(request, boundary) if boundary > max(start, request.tokens.prompt_len) else None

    def write_row(self, request: Request) -> None:
        """Has the device's copy of a request's row written anew."""
        residence = request.resident
        self.table.write(residence.row, 0, self.table.slots[residence.row, : residence.num_kv_slots])

    def keep_checkpoints(self, request: Request, checkpoints: Sequence[Checkpoint]) -> None:
        """Gives the tree a running request's states at some lengths, with the KV up to the deepest.

        The checkpoints' slots must hold these states; they are the tree's afterwards. The request's row then names the
        tree's slots up to the deepest length, and the request's lock moves there.
        """
        residence = request.resident
        result = self._insert(request, checkpoints)
        receipt = self.cache.lock_kv(result.node)
        self.supply.release(self.cache.unlock(residence.receipt))
        residence.receipt = receipt
        replaced = slice(residence.protected_length, result.kv_length)
        self.table.write(residence.row, replaced.start, result.kv_slots[replaced])
        residence.protected_length = result.kv_length

    def donate(self, request: Request, origin: str) -> None:
        """Moves a request out and leaves what it computed in the tree; nothing, if its state is lost.

        Its working slot becomes a checkpoint of the given origin, its latest periodic checkpoint one, too. No step in
        flight may work on it.
        """
        residence = request.resident
        if self.enabled:
            self.catch_up()
        if not self.enabled or self.has_lost_state(request):
            self.vacate(request)
            return
        assert request.num_computed_tokens > 0, "it was admitted and has not run: its working slot holds nothing"
        assert not request.is_in_flight, "its working slot is still being written"
        checkpoints = [Checkpoint(request.num_computed_tokens, residence.working_slot, origin)]
        # A step in flight may have computed the token with which the request ended: nobody goes on before that one.
        end = min(request.num_computed_tokens, request.num_tokens - 1)
        latest = [track for track in residence.tracks if track.length <= end][-1:]
        if latest and latest[0].length < request.num_computed_tokens:
            checkpoints += latest
            residence.tracks.remove(latest[0])
        result = self._insert(request, checkpoints)
        self.supply.release_states(residence.track_slots)
        self._move_out(request, first_own=result.kv_length)

    def vacate(self, request: Request) -> None:
        """Moves a request out and leaves nothing of its own: for a working slot that is not worth or fit to keep."""
        if self.lagging is not None:
            if self.has_lost_state(request):
                self._note_loss(request)
            self.lagging.forget(request.resident.row)
        self.supply.release_states(request.resident.state_slots)
        self._move_out(request, first_own=request.resident.protected_length)

    def has_lost_state(self, request: Request) -> bool:
        """Whether the working slot of a request that runs is not what it should be: it has to be vacated."""
        return self.lagging is not None and self.lagging.is_lost(request.resident.row)

    def catch_up(self) -> None:
        """Brings working slots up to date. Those of which that fails are lost."""
        if self.lagging is not None:
            with suppress(Exception):  # the model's
                self.lagging.catch_up()

    def _note_loss(self, request: Request) -> None:
        request.num_lost_states += 1
        if request.num_lost_states == MAX_LOST_STATES:
            _LOGGER.warning(
                "request %s speculates no more: %d times its states could not be written",
                request.request_id,
                MAX_LOST_STATES,
            )

    def _lookup_key(self, request: Request) -> NDArray[np.int32]:
        return request.matchable_tokens if self.enabled else NO_TOKENS

    def _move_in(self, request: Request, found: PrefixMatch, match: PrefixMatch, headroom: int) -> Admission | None:
        """`found` is what the cache has for the request, `match` what it makes use of."""
        num_own, kept = request.num_tokens - match.state_length, evictable_at(match.node)
        # Before the lock, which counts as a use: a request that waits for room uses nothing.
        if not self.supply.can_supply(num_own + headroom + kept.num_kv, 1 + kept.num_states):
            return None
        receipt = self.cache.lock(match.node)
        taken = self._take_for_residence(num_own)
        if taken is None:
            self.supply.release(self.cache.unlock(receipt))
            return None
        row, working_slot, kv_slots = taken
        request.residence = Residence(
            row=row,
            working_slot=working_slot,
            receipt=receipt,
            protected_length=match.state_length,
            num_kv_slots=match.state_length,
        )
        self.table.write(row, 0, match.kv_slots)
        self.extend(request, kv_slots)
        request.num_computed_tokens = request.num_landed_tokens = match.state_length
        request.status = RequestStatus.RUNNING
        request.following = None
        request.due_checkpoints = self._due_checkpoints(request, match)
        if request.prefix_hit is None:
            request.prefix_hit = describe_lookup(request, found, match, self.supply.ghosts if self.enabled else None)
            if self.enabled and not request.is_prefill_only:
                self.lookups.add(request, request.prefix_hit)
        return Admission(request, match.state_slot)

    def _take_for_residence(self, num_kv: int) -> tuple[int, StateSlot, NDArray[np.int32]] | None:
        """A row, a working slot and KV slots; None, with none of them taken, if they are not all available."""
        try:
            with ExitStack() as undo:
                row = self.table.allocate_row()
                undo.callback(self.table.release_row, row)
                states = self.supply.take_states(1)
                undo.callback(self.supply.release_states, states)
                kv_slots = self.supply.take_kv(num_kv)
                undo.pop_all()
        except PoolExhausted:
            return None
        return row, StateSlot(int(states[0])), kv_slots

    def _insert(self, request: Request, checkpoints: Sequence[Checkpoint]) -> InsertResult:
        residence = request.resident
        deepest = max(checkpoint.length for checkpoint in checkpoints)
        result = self.cache.insert(
            request.tokens[:deepest],
            self.table.slots[residence.row, :deepest],
            checkpoints,
            protected_length=residence.protected_length,
        )
        duplicates = result.duplicate_state_slots.tolist()
        self.supply.release_kv(result.duplicate_kv_slots)
        self.supply.release_states(duplicates)
        kept = (checkpoint.origin for checkpoint in checkpoints if checkpoint.state_slot not in duplicates)
        self.num_kept_checkpoints.update(kept)
        return result

    def _move_out(self, request: Request, first_own: int) -> None:
        """Releases the KV slots from position `first_own` on, the row and the lock."""
        residence = request.resident
        self.supply.release_kv(self.table.slots[residence.row, first_own : residence.num_kv_slots])
        self.supply.release(self.cache.unlock(residence.receipt))
        self.table.release_row(residence.row)
        request.residence = None
        request.num_computed_tokens = request.num_landed_tokens = 0
        request.is_verifying = False

    def _due_checkpoints(self, request: Request, match: PrefixMatch) -> dict[int, str]:
        if not self.enabled:
            return {}
        return due_in_prompt(
            self.policy,
            prompt_len=request.tokens.prompt_len,
            hints=request.params.checkpoint_positions,
            state_length=match.state_length,
            kv_length=match.kv_length,
        )

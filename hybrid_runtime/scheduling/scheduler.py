"""Chooses what the next step computes, and on which slots."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.scheduling.budget import share_budget
from hybrid_runtime.scheduling.drafting import Drafting
from hybrid_runtime.scheduling.placement import due_after_decode, due_in_span
from hybrid_runtime.scheduling.request import Request, RequestStatus
from hybrid_runtime.scheduling.residency import Admission, Residency
from hybrid_runtime.scheduling.sharing import find_leader, still_follows
from hybrid_runtime.scheduling.waiting_queue import ORDER, WaitingQueue
from hybrid_runtime.speculative.draft import Draft


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `[start, stop)` of a request. The checkpoints get the states at lengths in `start+1..stop`."""

    request: Request
    start: int
    stop: int
    checkpoints: tuple[Checkpoint, ...]

    @property
    def is_last(self) -> bool:
        """Whether its last token's logits give the next token."""
        return self.stop == self.request.num_tokens


@dataclass(frozen=True)
class DecodeRow:
    """The one uncomputed token of a request, at `position`. `checkpoint`, if any, gets a copy of the state after it.

    While the step before is in flight the token may not be known on the host.
    """

    request: Request
    position: int
    checkpoint: Checkpoint | None

    @property
    def stop(self) -> int:
        """Tokens that the request has computed afterwards."""
        return self.position + 1


@dataclass(frozen=True)
class VerifyRow:
    """The last token of a request, at `position`, and a draft of what follows it, which may be empty.

    The row of the request table names KV slots for the last token and behind it for the drafted nodes, in their order.
    How many tokens are computed afterwards is known when the step has landed.
    """

    request: Request
    position: int
    draft: Draft

    @property
    def stop(self) -> int:
        """Tokens that the request has computed afterwards, at least."""
        return self.position + 1


@dataclass(frozen=True)
class ScheduledStep:
    """One engine iteration: what to do to working slots first, then at most one forward each to prefill, decode and
    verify.
    """

    admissions: tuple[Admission, ...]
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeRow, ...]
    verify: tuple[VerifyRow, ...] = ()

    @property
    def works(self) -> tuple[PrefillChunk | DecodeRow | VerifyRow, ...]:
        """All that the forwards of this step compute."""
        return (*self.prefill, *self.decode, *self.verify)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests that a forward of this step works on."""
        return tuple(work.request for work in self.works)

    @property
    def unowned_checkpoints(self) -> list[Checkpoint]:
        """Those whose slots are neither the tree's nor a request's until the step is applied."""
        in_prefill = [checkpoint for chunk in self.prefill for checkpoint in chunk.checkpoints]
        in_decode = [row.checkpoint for row in self.decode if row.checkpoint is not None]
        return in_prefill + [checkpoint for checkpoint in in_decode if checkpoint.origin != "track"]


class Scheduler:
    """Continuous batching: decode rows first, then admissions, then prefill chunks within a token budget.

    A request with exactly one uncomputed token is a decode row, whether the token was sampled or is the last of its
    prompt. Every other resident request prefills.

    One step may be scheduled while the one before is in flight (`schedule_ahead`), from what is known without its
    result: how many tokens each request has, not which.

    With `drafting`, requests that decode may verify drafts instead; then steps are not scheduled ahead.
    """

    def __init__(
        self,
        residency: Residency,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafting: Drafting | None = None,
    ) -> None:
        self.drafting = drafting
        self.residency = residency
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in their order
        self.num_preemptions = 0
        self._suspects: list[Request] = []  # each shared a forward that failed

    def add(self, request: Request) -> None:
        """Queues a request that owns nothing."""
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def schedule(self) -> ScheduledStep:
        """The next step, with none in flight. Preempts, evicts, admits and takes slots; what it returns must be run or
        `reset`.

        While some request has to run alone (a forward with it among others failed), steps hold one such request and
        nothing else, unless none of them can be admitted beside what is resident.
        """
        self._catch_up()
        self._suspects = [r for r in self._suspects if r.runs_alone and r.status is not RequestStatus.FINISHED]
        if not self._suspects:
            self._supply_decode_slots(self.running)
            return self._schedule_among(self.running, self.waiting)
        for request in sorted(self._suspects, key=ORDER):
            running, waiting = _by_status([request])
            self._supply_decode_slots(running)
            step = self._schedule_among(running, waiting)
            if step.requests:
                return step
        running, waiting = _by_status(r for r in (*self.running, *self.waiting) if r not in self._suspects)
        self._supply_decode_slots(running)
        return self._schedule_among(running, waiting)

    def schedule_ahead(self) -> ScheduledStep | None:
        """The next step while another one is in flight; None, with nothing changed, if that one must land first.

        It must where a token is chosen by a rule that reads the tokens before it, where some request has to run alone,
        and where a row finds no KV slot: who is in flight cannot be preempted.
        """
        waits_for_tokens = any(r.reads_its_output and r.has_token_in_flight for r in self.running)
        if self.drafting is not None or self._suspects or waits_for_tokens:
            return None
        try:
            self._take_decode_slots(self.running)
        except PoolExhausted:
            return None
        return self._schedule_among(self.running, self.waiting)

    def note_launch(self, step: ScheduledStep) -> None:
        """The step's tokens count as computed from now on, and what its working slots are copied from may go.

        Whatever is done to freed slots is done by later steps, which run behind this one.
        """
        works: tuple[PrefillChunk | DecodeRow, ...] = (*step.prefill, *step.decode)
        for work in works:
            work.request.num_computed_tokens = work.stop
        for row in step.verify:
            row.request.is_verifying = True
        for admission in step.admissions:
            admission.request.resident.receipt.release_state()

    def finish(self, request: Request) -> None:
        """Ends a request in any status, leaving what it computed in the tree."""
        self._end(request, "hint" if request.is_prefill_only else "final")

    def drop(self, request: Request) -> None:
        """Ends a request in any status; nothing of it is kept."""
        self._end(request, None)

    def depart(self, request: Request) -> None:
        """Moves out a request that was leaving, now that no step in flight works on it any more."""
        assert request.status is RequestStatus.LEAVING
        self._move_out(request, request.parting_origin)

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the queue. What it computed stays in the tree, to resume from."""
        self.running.remove(request)
        self.residency.donate(request, "final")
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def suspect(self, step: ScheduledStep) -> None:
        """After a forward over several requests failed: each runs alone until it is past the token at which it did."""
        if len(step.requests) > 1:
            for work in step.works:
                work.request.alone_until = work.stop
            running = (request for request in step.requests if request.status is RequestStatus.RUNNING)
            self._suspects = list(dict.fromkeys((*self._suspects, *running)))

    def reset(self, step: ScheduledStep) -> None:
        """Undoes a step that did not run to its end: its requests go back to the queue and resume from the tree.

        No state of theirs is kept, since it may be half written. A leaving one is gone then. A step that was launched
        behind this one must be undone as well, in any order.
        """
        self.residency.supply.release_states(checkpoint.state_slot for checkpoint in step.unowned_checkpoints)
        admitted = (admission.request for admission in step.admissions)
        for request in dict.fromkeys((*step.requests, *admitted)):
            if request.status is RequestStatus.LEAVING:
                self._move_out(request, None)
            elif request.status is RequestStatus.RUNNING:
                self._requeue(request)

    def start_over(self) -> None:
        """Forgets all requests; their slots are declared free elsewhere."""
        self.waiting = WaitingQueue()
        self.running = []
        self._suspects = []

    def _schedule_among(self, running: Sequence[Request], waiting: Iterable[Request]) -> ScheduledStep:
        """A step of the given requests, both in their order. Those that decode have their KV slots."""
        resident = [request for request in running if _goes_on(request)]
        admissions = self._admit(waiting)
        if admissions:
            resident = sorted((*resident, *(admission.request for admission in admissions)), key=ORDER)
        decoding = [request for request in resident if request.num_uncomputed_tokens == 1]
        verify = self._verify_rows(decoding)
        verifying = {row.request for row in verify}
        decode = tuple(self._decode_row(request) for request in decoding if request not in verifying)
        prefilling = [] if len(decoding) == len(resident) else [r for r in resident if r.num_uncomputed_tokens > 1]
        shares = share_budget(self.max_num_batched_tokens, [r.num_uncomputed_tokens for r in prefilling])
        prefill = tuple(
            self._cut_chunk(request, share) for request, share in zip(prefilling, shares, strict=True) if share
        )
        return ScheduledStep(admissions, prefill, decode, verify)

    def _verify_rows(self, decoding: Sequence[Request]) -> tuple[VerifyRow, ...]:
        """Those of the decoding requests that have an output token, are not done with the next one and may speculate.

        Without any draft none of them: a decode costs less.
        """
        if self.drafting is None:
            return ()
        able = [r for r in decoding if r.may_speculate and r.num_computed_tokens >= r.tokens.prompt_len]
        able = [r for r in able if not r.is_prefill_only]
        drafts = self.drafting(able) if able else {}
        if not any(len(draft) for draft in drafts.values()):
            for request in able:
                self.drafting.note(request, 0, 0)
            return ()
        return tuple(VerifyRow(request, request.num_computed_tokens, drafts[request]) for request in able)

    def _supply_decode_slots(self, candidates: Sequence[Request]) -> None:
        """One KV slot for each row that has none left, preempting others where the pool cannot give them all."""
        while True:
            try:
                self._take_decode_slots(candidates)
            except PoolExhausted:
                self.preempt(self.running[-1])
            else:
                return

    def _take_decode_slots(self, candidates: Sequence[Request]) -> None:
        """One KV slot for each row that has none left. Raises PoolExhausted, and takes none, if one is missing."""
        short = [r for r in candidates if _goes_on(r) and r.resident.num_kv_slots == r.num_computed_tokens]
        if short:
            self.residency.extend_each(short, self.residency.supply.take_kv(len(short)))

    def _admit(self, waiting: Iterable[Request]) -> tuple[Admission, ...]:
        """Admits in order until one does not fit: a large request is not overtaken for ever by small ones."""
        admissions: list[Admission] = []
        for request in waiting:
            if self._waits_for_leader(request):
                continue  # those behind it may pass: it waits by choice, not for room
            num_prefilling = sum(r.num_uncomputed_tokens > 1 for r in self.running)
            if len(self.running) == self.max_num_seqs or num_prefilling >= self.max_num_batched_tokens:
                break
            # Each running row will want a slot soon: admitting into the last ones would only bring a preemption.
            admission = self.residency.admit(request, headroom=len(self.running))
            if admission is None and not self.running:
                admission = self.residency.admit_unmatched(request)
            if admission is None:
                break
            self.waiting.remove(request)
            insort(self.running, request, key=ORDER)
            admissions.append(admission)
        return tuple(admissions)

    def _waits_for_leader(self, request: Request) -> bool:
        """Whether another request is computing what this one would; asks that one for a checkpoint there."""
        if still_follows(request):
            return True
        request.following = None
        must_compute_all = len(request.matchable_tokens) < request.num_tokens
        prefilling = [other for other in self.running if _may_lead(other)]
        if not self.residency.enabled or request.runs_alone or must_compute_all or not prefilling:
            return False
        request.following = find_leader(
            request,
            prefilling,
            state_length=self.residency.reachable_length(request),
            min_saving=self.residency.policy.min_saving,
        )
        if request.following is None:
            return False
        request.following.leader.due_checkpoints.setdefault(request.following.length, "junction")
        return True

    def _cut_chunk(self, request: Request, num_tokens: int) -> PrefillChunk:
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        checkpoints: list[Checkpoint] = []
        for length, origin in due_in_span(request.due_checkpoints, start, stop):
            slot = self.residency.take_checkpoint_slot(origin)
            if slot is not None:
                checkpoints.append(Checkpoint(length, slot, origin))
        return PrefillChunk(request, start, stop, tuple(sorted(checkpoints, key=lambda c: c.length)))

    def _decode_row(self, request: Request) -> DecodeRow:
        position = request.num_computed_tokens
        length = position + 1
        origin = None
        if self.residency.enabled:
            origin = due_after_decode(
                self.residency.policy, request.due_checkpoints, prompt_len=request.tokens.prompt_len, length=length
            )
        if origin is None:
            return DecodeRow(request, position, None)
        if origin == "track":
            return DecodeRow(request, position, self.residency.track(request, length))
        slot = self.residency.take_checkpoint_slot(origin)
        return DecodeRow(request, position, None if slot is None else Checkpoint(length, slot, origin))

    def _catch_up(self) -> None:
        """Brings working slots up to date. Requests of which that fails, or failed, must not run on them."""
        self.residency.catch_up()
        for request in [request for request in self.running if self.residency.has_lost_state(request)]:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Sends a running request back to the queue; it resumes from what the tree has had of it."""
        self.running.remove(request)
        self.residency.vacate(request)
        self.add(request)

    def _end(self, request: Request, origin: str | None) -> None:
        """`origin`: of the state that it leaves; None: it leaves none."""
        if request.status is RequestStatus.RUNNING:
            request.status, request.parting_origin = RequestStatus.LEAVING, origin
            if not request.is_in_flight:
                self.depart(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            request.status = RequestStatus.FINISHED
        elif origin is None:
            request.parting_origin = None

    def _move_out(self, request: Request, origin: str | None) -> None:
        self.running.remove(request)
        if origin is None:
            self.residency.vacate(request)
        else:
            self.residency.donate(request, origin)
        request.status = RequestStatus.FINISHED


def _goes_on(request: Request) -> bool:
    """Whether it is resident and has something left to compute."""
    return request.status is RequestStatus.RUNNING and not request.awaits_its_end


def _may_lead(request: Request) -> bool:
    """Whether it is yet to leave checkpoints that others may wait for."""
    if request.status is not RequestStatus.RUNNING:
        return False
    landed = request.num_landed_tokens
    return request.num_uncomputed_tokens > 1 or (
        request.is_in_flight and any(length > landed for length in request.due_checkpoints)
    )


def _by_status(requests: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Those that run, and those that wait."""
    requests = list(requests)
    running = [request for request in requests if request.status is RequestStatus.RUNNING]
    return running, [request for request in requests if request.status is RequestStatus.WAITING]

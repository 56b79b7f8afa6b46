"""The engine loop. One step: schedule, prepare, launch, and apply what has landed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.engine.completion import Stop
from hybrid_runtime.engine.delivery import Delivery
from hybrid_runtime.engine.launching import DirectLauncher, FlyingStep, StepLauncher
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.ranges import Range
from hybrid_runtime.engine.request_group import RequestGroup
from hybrid_runtime.engine.results import ForwardResult
from hybrid_runtime.engine.runner import ModelRunner
from hybrid_runtime.engine.verdicts import Verdicts
from hybrid_runtime.errors import ReentrantCallError
from hybrid_runtime.scheduling.request import Request, RequestStatus
from hybrid_runtime.scheduling.scheduler import ScheduledStep, Scheduler
from hybrid_runtime.text.detokenizer import TokenDecoder

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Flight:
    """A step between its launch and its landing, when its results are applied."""

    step: ScheduledStep
    flying: FlyingStep


class Engine:
    """Drives requests through the model until they end.

    With `overlaps` a step is scheduled and launched while the one before runs; else each has landed before the next.
    Whatever is out of the ordinary waits until none is in flight. A request that ends while the next step already works
    on it is delivered at once, and gives up its slots when that step has landed.

    A request whose forward raises, yields logits that are not numbers, or whose tokens the tokenizer cannot decode ends
    with `finish_reason="error"` and the message as `stop_reason`; those that shared the forward end as if nothing had
    happened.

    An exception may get out of any method at any line (an interrupt, above all): the next call starts over from what
    users have been given. Calls from within a step, by a signal handler or a finalizer, are put off or refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        memory: EngineMemory,
        *,
        tokenizer: TokenDecoder | None,
        debug_checks: bool,
        launcher: StepLauncher | None = None,
        overlaps: bool = False,
    ) -> None:
        """`launcher`: None runs steps in the calling thread."""
        self.scheduler = scheduler
        self.runner = runner
        self.memory = memory
        self.debug_checks = debug_checks
        self.launcher = launcher or DirectLauncher(runner)
        self.max_in_flight = 2 if overlaps else 1
        self.in_flight: deque[Flight] = deque()  # the next to land comes first
        if memory.tier is not None:
            memory.tier.before_restore = self.launcher.finish
        self.delivery = Delivery(scheduler, tokenizer)
        self.groups, self.progressed = self.delivery.groups, self.delivery.progressed
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_wasted_rows = 0  # of requests that turned out to have ended with the step before
        self.verdicts = Verdicts(scheduler, runner, self.delivery)
        self._is_settled = True  # False: the bookkeeping is half done, now or since an exception got out of it
        self._is_busy = False
        self._put_off: list[RequestGroup] = []  # to abort when the step that runs is over

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do or to deliver."""
        return bool(self.groups or self.progressed or self.in_flight)

    def add(self, group: RequestGroup) -> None:
        """Queues a request under an id that no unfinished request has."""
        assert group.request_id not in self.groups

        def work() -> None:
            self.groups[group.request_id] = group
            for request in group.requests:
                self.scheduler.add(request)

        self._do("add_request()", work)

    def abort(self, request_id: str) -> None:
        """Ends a request, at the end of the step if one is running. Ignores an id that no unfinished request has."""
        group = self.groups.get(request_id)
        if group is None:
            return
        if self._is_busy:
            self._put_off.append(group)
            return

        def work() -> None:
            if any(request.is_in_flight for request in group.requests):
                self._land_all()
            for request in group.unfinished_requests:
                self.scheduler.finish(request)
                self.delivery.end(request, Stop("abort"))

        self._do("abort()", work)

    def step(self) -> None:
        """One iteration; leaves in `progressed` the requests that have something new, those that ended included."""

        def work() -> None:
            if len(self.in_flight) == self.max_in_flight:  # waiting for it was interrupted
                self._land()
            if self.groups:
                self._advance()
            if not self.groups:
                self._land_all()
            if self.debug_checks:
                self.check()

        self._do("step()", work)

    def check(self) -> None:
        """Asserts that each slot has one owner. Valid between steps, with a step in flight, too."""
        in_flight = [checkpoint for flight in self.in_flight for checkpoint in flight.step.unowned_checkpoints]
        self.memory.check(self.scheduler.running, [checkpoint.state_slot for checkpoint in in_flight])

    def close(self) -> None:
        """Drops what is in flight and gives the memory back; nothing can run afterwards."""
        self.require_idle("close()")
        self.launcher.close()
        self.in_flight.clear()
        self.runner.close()
        self.memory.free()

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Raises RuntimeError while requests are running."""

        def work() -> None:
            self._land_all()
            if not self.scheduler.running:
                self.memory.reset_cache()
                self.runner.repack_weights()

        self._do("reset_prefix_cache()", work)
        if self.scheduler.running:
            raise RuntimeError(
                f"{len(self.scheduler.running)} requests are running on the prefix cache: finish or abort them first"
            )

    def run_between_steps(self, call: str, work: Callable[[], T], *, harmless: tuple[type[BaseException], ...]) -> T:
        """Runs `work` while no step is in flight, and returns its result.

        After an exception of the kinds `harmless` everything must be as before; after any other the engine starts over.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def guarded() -> None:
            self._land_all()
            try:
                results.append(work())
            except harmless as error:
                errors.append(error)

        self._do(call, guarded)
        if errors:
            raise errors[0]
        return results[0]

    def settle(self) -> None:
        """Makes good what an exception left half done, so that the counters are right."""
        if not self._is_settled and not self._is_busy:
            self._do("settle()", lambda: None)

    def require_idle(self, call: str) -> None:
        """Raises ReentrantCallError if `call` comes from within another call of the engine."""
        if self._is_busy:
            raise ReentrantCallError(f"{call} was called from within a step of the same runtime")

    def _do(self, call: str, work: Callable[[], None]) -> None:
        """Whoever changes anything does it in here: what an exception left half done is made good first."""
        self.require_idle(call)
        try:
            try:
                self._is_busy = True
                if not self._is_settled:
                    self._recover()
                self._is_settled = False
                work()
                self._is_settled = True
            finally:
                self._is_busy = False
        finally:  # once more: an interrupt may have come just before
            self._is_busy = False
        while self._put_off:
            group = self._put_off.pop()
            if self.groups.get(group.request_id) is group:
                self.abort(group.request_id)

    def _advance(self) -> None:
        """Launches a step if there is one, and lands one if that makes as many as may be in flight, or if none is."""
        step = self._schedule()
        if step.requests:
            self._launch(step)
        elif not self.in_flight and self.groups:
            self._give_up_waiting()
        if self.in_flight and (not step.requests or len(self.in_flight) == self.max_in_flight):
            self._land()

    def _schedule(self) -> ScheduledStep:
        with Range("schedule"):
            if self.in_flight:
                step = self.scheduler.schedule_ahead()
                if step is not None:
                    return step
                self._land_all()
            return self.scheduler.schedule()

    def _launch(self, step: ScheduledStep) -> None:
        self.num_steps += 1
        for admission in step.admissions:
            self.groups[admission.request.request_id].mark_scheduled()
        try:
            with Range("prepare"):
                prepared = self.runner.prepare(step)
            flying = self.launcher.launch(prepared)
        except BaseException as error:  # an interrupt, or a step that cannot even be prepared
            self._undo([*(flight.step for flight in self.in_flight), step], error, failed=step)
        else:
            self.in_flight.append(Flight(step, flying))
            self.scheduler.note_launch(step)

    def _land(self) -> None:
        """Waits for the step that was launched first of those in flight, and applies its results."""
        flight = self.in_flight[0]
        self._is_settled = True  # an interrupt while it waits leaves the step in flight
        outcome = flight.flying.wait()
        self._is_settled = False
        if outcome.error is not None:
            self._undo([each.step for each in self.in_flight], outcome.error, failed=flight.step)
            return
        self.in_flight.popleft()
        with Range("apply"):
            self._apply(flight.step, outcome.results)

    def _land_all(self) -> None:
        while self.in_flight:
            self._land()

    def _undo(self, steps: Sequence[ScheduledStep], error: BaseException, *, failed: ScheduledStep) -> None:
        """Undoes all steps in flight after what came out of one of them, `failed`.

        Whatever a forward raises must not take the other requests down. What is no failure is raised again.
        """
        self.launcher.discard()
        self.in_flight.clear()
        is_failure = isinstance(error, Exception) and not isinstance(error, ReentrantCallError)
        if is_failure:
            self.scheduler.suspect(failed)
        for step in steps:
            self.scheduler.reset(step)
        for request in self.scheduler.running:  # what the steps were to write to the device's table may be lost
            self.scheduler.residency.write_row(request)
        if not is_failure:
            self._is_settled = True
            raise error
        self._note_failure(failed, error)

    def _recover(self) -> None:
        """Starts over from what users have been given, after an exception in the middle of the bookkeeping.

        Who owns which slot is not known any more, so the pools and the cache are declared empty, and the unfinished
        requests go back to the queue. May itself be interrupted, and is then done again.
        """
        self.launcher.discard()
        self.in_flight.clear()
        self.runner.commits.forget_all()
        self.memory.start_over()
        self.scheduler.start_over()
        for group in list(self.groups.values()):
            group.restore()
            for request in group.unfinished_requests:
                self.scheduler.add(request)
            self.delivery.note_progress(group)

    def _apply(self, step: ScheduledStep, results: list[ForwardResult]) -> None:
        invalid = frozenset(request for result in results for request in result.invalid)
        for chunk in step.prefill:
            self.num_prefill_tokens += chunk.stop - chunk.start
            chunk.request.num_landed_tokens = chunk.stop
            self._apply_checkpoints(chunk.request, chunk.checkpoints, is_valid=chunk.request not in invalid)
        for row in step.decode:
            self.num_decode_tokens += 1
            row.request.num_landed_tokens = row.stop
            if row.request.status is RequestStatus.LEAVING:
                self.num_wasted_rows += 1
            if row.checkpoint is not None and row.checkpoint.origin != "track":
                self._apply_checkpoints(row.request, (row.checkpoint,), is_valid=row.request not in invalid)
        for result in results:
            for scored in result.scored:
                self.delivery.append(scored)
            for sampled in result.sampled:
                self.delivery.append(sampled)
            if result.verified is not None:
                self.num_decode_tokens += self.verdicts.apply(result.verified, invalid)
        for request in invalid:
            if request.status is RequestStatus.RUNNING:
                self.delivery.drop(request, "the model's logits are not finite numbers (NaN or infinity)")
            else:
                self.scheduler.drop(request)
        for request in step.requests:
            if request.is_prefill_only or request.status is RequestStatus.LEAVING:
                self._apply_end(request)

    def _apply_end(self, request: Request) -> None:
        """Ends a warm-up whose prompt is computed, and moves out whoever was leaving."""
        if request.status is RequestStatus.LEAVING and not request.is_in_flight:
            self.scheduler.depart(request)
        is_computed = request.is_prefill_only and request.num_landed_tokens == request.num_tokens
        if is_computed and request.status is RequestStatus.RUNNING:
            self.scheduler.finish(request)
            self.delivery.end(request, Stop("length"))

    def _apply_checkpoints(self, request: Request, checkpoints: tuple[Checkpoint, ...], *, is_valid: bool) -> None:
        if not checkpoints:
            return
        if is_valid and (request.status is RequestStatus.RUNNING or request.parting_origin is not None):
            self.scheduler.residency.keep_checkpoints(request, checkpoints)
        else:
            self.memory.supply.release_states(checkpoint.state_slot for checkpoint in checkpoints)

    def _note_failure(self, step: ScheduledStep, error: BaseException) -> None:
        """After a failed forward: if it held one request, that is the culprit."""
        _LOGGER.error("a forward over %d requests failed", len(step.requests), exc_info=error)
        if len(step.requests) == 1 and step.requests[0].status is RequestStatus.WAITING:
            self.delivery.drop(step.requests[0], f"{type(error).__name__}: {error}")

    def _give_up_waiting(self) -> None:
        """After a step that can't do anything: ends the request for which there is no room, though nothing runs.

        The memory plan rules that out unless slots were lost.
        """
        assert not self.scheduler.running
        request, supply = next(iter(self.scheduler.waiting)), self.memory.supply
        self.delivery.drop(
            request,
            f"PoolExhausted: nothing runs, and still there is no room for {request.num_tokens} tokens: "
            f"{supply.kv.num_free} of {supply.kv.num_slots} KV slots and {supply.states.num_free} of "
            f"{supply.states.num_slots} state slots are free, {supply.cache.num_evictable_kv} and "
            f"{supply.cache.num_evictable_states} evictable",
        )

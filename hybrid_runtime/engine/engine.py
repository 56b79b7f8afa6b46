"""The engine loop. One step: schedule, load, copy, run, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import nvtx

from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.engine.completion import Stop
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.request_group import RequestGroup
from hybrid_runtime.engine.results import ForwardResult, RankedLogprobs, SampledToken, ScoredToken
from hybrid_runtime.engine.runner import ModelRunner
from hybrid_runtime.errors import ReentrantCallError
from hybrid_runtime.outputs import TokenLogprobs, token_logprobs
from hybrid_runtime.scheduling.request import Request, RequestStatus
from hybrid_runtime.scheduling.scheduler import DecodeRow, PrefillChunk, ScheduledStep, Scheduler
from hybrid_runtime.text.detokenizer import TokenDecoder

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Drives requests through the model until they end.

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
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.memory = memory
        self.tokenizer = tokenizer
        self.debug_checks = debug_checks
        self.groups: dict[str, RequestGroup] = {}  # unfinished
        self.progressed: dict[str, RequestGroup] = {}  # those with something new; whoever delivers them removes them
        self.num_steps = 0
        self.num_finished = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._is_settled = True  # False: the bookkeeping is half done, now or since an exception got out of it
        self._is_busy = False
        self._put_off: list[RequestGroup] = []  # to abort when the step that runs is over

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do or to deliver."""
        return bool(self.groups or self.progressed)

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
            for request in group.unfinished_requests:
                self.scheduler.finish(request)
                self._end(request, Stop("abort"))

        self._do("abort()", work)

    def step(self) -> None:
        """One iteration; leaves in `progressed` the requests that have something new, those that ended included."""

        def work() -> None:
            if self.groups:
                self._run_step()
            if self.debug_checks:
                self.memory.check(self.scheduler.running)

        self._do("step()", work)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Raises RuntimeError while requests are running."""

        def work() -> None:
            if not self.scheduler.running:
                self.memory.reset_cache()

        self._do("reset_prefix_cache()", work)
        if self.scheduler.running:
            raise RuntimeError(
                f"{len(self.scheduler.running)} requests are running on the prefix cache: finish or abort them first"
            )

    def run_between_steps(self, call: str, work: Callable[[], T], *, harmless: tuple[type[BaseException], ...]) -> T:
        """Runs `work` while no step runs, and returns its result.

        After an exception of the kinds `harmless` everything must be as before; after any other the engine starts over.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def guarded() -> None:
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

    def _run_step(self) -> None:
        with nvtx.annotate("schedule"):
            step = self.scheduler.schedule()
        if not step.requests:
            self._give_up_waiting()
            return
        self.num_steps += 1
        for request in step.requests:
            self.groups[request.request_id].mark_scheduled()
        try:
            results = self._run(step)
        except BaseException as error:
            self.scheduler.reset(step)
            if isinstance(error, ReentrantCallError) or not isinstance(error, Exception):
                self._is_settled = True
                raise
            # Whatever else a forward raises must not take the other requests down.
            self._note_failure(step, error)
        else:
            with nvtx.annotate("apply"):
                self._apply(step, results)

    def _recover(self) -> None:
        """Starts over from what users have been given, after an exception in the middle of the bookkeeping.

        Who owns which slot is not known any more, so the pools and the cache are declared empty, and the unfinished
        requests go back to the queue. May itself be interrupted, and is then done again.
        """
        self.memory.start_over()
        self.scheduler.start_over()
        for group in list(self.groups.values()):
            group.restore()
            for request in group.unfinished_requests:
                self.scheduler.add(request)
            self._note_progress(group)

    def _run(self, step: ScheduledStep) -> list[ForwardResult]:
        with nvtx.annotate("prepare"):
            prepared = self.runner.prepare(step)
        return self.runner.launch(prepared).wait()

    def _apply(self, step: ScheduledStep, results: list[ForwardResult]) -> None:
        invalid = frozenset(request for result in results for request in result.invalid)
        for admission in step.admissions:  # not before: an interrupt of the forwards must find no lock half released
            admission.request.resident.receipt.release_state()
        for chunk in step.prefill:
            self._apply_chunk(chunk, is_valid=chunk.request not in invalid)
        for row in step.decode:
            self._apply_row(row, is_valid=row.request not in invalid)
        for result in results:
            tokens: list[ScoredToken | SampledToken] = [*result.scored, *result.sampled]
            for token in tokens:
                # A tokenizer may fail on a token: that must not take the other requests down either.
                try:
                    self._append(token)
                except Exception as error:  # the tokenizer's
                    _LOGGER.error("a token of request %s failed", token.request.request_id, exc_info=error)
                    self._drop(token.request, f"{type(error).__name__}: {error}")
        for request in invalid:
            self._drop(request, "the model's logits are not finite numbers (NaN or infinity)")
        for request in step.requests:
            if request.is_prefill_only and request not in invalid and request.num_uncomputed_tokens == 0:
                self.scheduler.finish(request)
                self._end(request, Stop("length"))

    def _apply_chunk(self, chunk: PrefillChunk, *, is_valid: bool) -> None:
        chunk.request.num_computed_tokens = chunk.stop
        self.num_prefill_tokens += chunk.stop - chunk.start
        self._apply_checkpoints(chunk.request, chunk.checkpoints, is_valid=is_valid)

    def _apply_row(self, row: DecodeRow, *, is_valid: bool) -> None:
        row.request.num_computed_tokens += 1
        self.num_decode_tokens += 1
        checkpoint = row.checkpoint
        if checkpoint is None:
            return
        if checkpoint.origin != "track":
            self._apply_checkpoints(row.request, (checkpoint,), is_valid=is_valid)
        elif is_valid:
            row.request.resident.tracked = checkpoint

    def _apply_checkpoints(self, request: Request, checkpoints: tuple[Checkpoint, ...], *, is_valid: bool) -> None:
        if not checkpoints:
            return
        if is_valid:
            self.scheduler.residency.keep_checkpoints(request, checkpoints)
        else:
            self.memory.supply.release_states(checkpoint.state_slot for checkpoint in checkpoints)

    def _append(self, token: SampledToken | ScoredToken) -> None:
        request = token.request
        if request.status is RequestStatus.FINISHED:
            return  # an earlier token of this step failed
        group = self.groups[request.request_id]
        logprobs = None if token.logprobs is None else self._logprobs_entry(token.token_id, token.logprobs)
        if isinstance(token, ScoredToken):
            assert logprobs is not None
            group.add_prompt_logprobs([logprobs])
            request.num_prompt_logits_read += 1
            return
        request.tokens.append(token.token_id)
        stop = group.add_token(request.sample_index, token.token_id, logprobs)
        request.forbidden_token_ids = group.completions[request.sample_index].forbidden_token_ids
        if stop is not None:
            self.scheduler.finish(request)
        self._note_progress(group)

    def _note_failure(self, step: ScheduledStep, error: Exception) -> None:
        """After a failed forward: if it held one request, that is the culprit."""
        _LOGGER.error("a forward over %d requests failed", len(step.requests), exc_info=error)
        if len(step.requests) == 1:
            self._drop(step.requests[0], f"{type(error).__name__}: {error}")

    def _give_up_waiting(self) -> None:
        """After a step that can't do anything: ends the request for which there is no room, though nothing runs.

        The memory plan rules that out unless slots were lost.
        """
        assert not self.scheduler.running
        request, supply = next(iter(self.scheduler.waiting)), self.memory.supply
        self._drop(
            request,
            f"PoolExhausted: nothing runs, and still there is no room for {request.num_tokens} tokens: "
            f"{supply.kv.num_free} of {supply.kv.num_slots} KV slots and {supply.states.num_free} of "
            f"{supply.states.num_slots} state slots are free, {supply.cache.num_evictable_kv} and "
            f"{supply.cache.num_evictable_states} evictable",
        )

    def _drop(self, request: Request, message: str) -> None:
        """Ends a request with an error; nothing of it is kept."""
        self.scheduler.drop(request)
        self._end(request, Stop("error", message))

    def _end(self, request: Request, stop: Stop) -> None:
        group = self.groups[request.request_id]
        group.end(request.sample_index, stop)
        self._note_progress(group)

    def _note_progress(self, group: RequestGroup) -> None:
        self.progressed[group.request_id] = group
        if group.finished:
            del self.groups[group.request_id]
            self.num_finished += 1

    def _logprobs_entry(self, token_id: int, logprobs: RankedLogprobs) -> TokenLogprobs:
        decode = None if self.tokenizer is None else self._decode_token
        return token_logprobs(
            token_id, logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs, decode
        )

    def _decode_token(self, token_id: int) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

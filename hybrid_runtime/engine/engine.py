"""The engine loop. One step: schedule, load, copy, run, apply."""

from __future__ import annotations

import logging

import nvtx

from hybrid_runtime.engine.completion import Stop
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.request_group import RequestGroup
from hybrid_runtime.engine.runner import ModelRunner, PrefillResult, RankedLogprobs, SampledToken
from hybrid_runtime.outputs import TokenLogprobs, token_logprobs
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import ScheduledStep, Scheduler
from hybrid_runtime.text.detokenizer import TokenDecoder

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Drives requests through the model until they end.

    A request whose forward raises, or yields logits that are not numbers, ends with `finish_reason="error"` and its
    message as `stop_reason`; those that shared the forward resume from the tree and end as if nothing had happened.
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
        self.groups: dict[str, RequestGroup] = {}
        self.num_steps = 0
        self.num_finished = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._progressed: dict[str, RequestGroup] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do or to deliver."""
        return bool(self.groups or self._progressed)

    def add(self, group: RequestGroup) -> None:
        """Queues a request under an id that no unfinished request has."""
        assert group.request_id not in self.groups
        self.groups[group.request_id] = group
        for request in group.requests:
            self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; the next step delivers it. Does nothing if no unfinished request has that id."""
        group = self.groups.get(request_id)
        if group is None:
            return
        try:
            for request in group.unfinished_requests:
                self.scheduler.finish(request)
                group.end(request.sample_index, Stop("abort"))
            self._note_progress(group)
        except BaseException:
            self._recover()
            raise

    def discard(self, group: RequestGroup) -> None:
        """Ends a request, if it has not ended, whose outputs nobody waits for: no step delivers it."""
        if not group.finished:
            self.abort(group.request_id)
        if self._progressed.get(group.request_id) is group:
            del self._progressed[group.request_id]

    def step(self) -> list[RequestGroup]:
        """One iteration. Returns the requests that have something new, those that ended included.

        An interrupt leaves no request behind: the next step goes on with all of them.
        """
        if self.groups:
            self._run_step()
        if self.debug_checks:
            self.memory.check(self.scheduler.running)
        progressed, self._progressed = list(self._progressed.values()), {}
        return progressed

    def _run_step(self) -> None:
        is_undone = False
        try:
            with nvtx.annotate("schedule"):
                step = self.scheduler.schedule()
            assert step.requests, f"nothing can run, but {len(self.scheduler.waiting)} requests wait"
            self.num_steps += 1
            for request in step.requests:
                self.groups[request.request_id].mark_scheduled()
            try:
                prefilled, decoded = self._run(step)
            except Exception as error:  # whatever a forward raises must not take the other requests down
                self._fail(step, error)
            except BaseException:
                self.scheduler.reset(step)
                is_undone = True
                raise
            else:
                with nvtx.annotate("apply"):
                    self._apply(step, prefilled, decoded)
        except BaseException:
            if not is_undone:
                self._recover()
            raise

    def _recover(self) -> None:
        """Starts over from what users have been given, after an exception in the middle of the bookkeeping.

        Who owns which slot is not known any more, so the pools and the cache are declared empty, and the unfinished
        requests go back to the queue.
        """
        self.memory.start_over()
        self.scheduler.start_over()
        for group in list(self.groups.values()):
            group.restore()
            for request in group.unfinished_requests:
                self.scheduler.add(request)
            self._note_progress(group)

    def _run(self, step: ScheduledStep) -> tuple[PrefillResult, list[SampledToken]]:
        with nvtx.annotate("load"):
            self.memory.load_table()
        with nvtx.annotate("copy"):
            self.runner.prepare_states(step.admissions)
            for admission in step.admissions:
                admission.request.resident.receipt.release_state()
        prefilled, decoded = PrefillResult([], []), []
        if step.prefill:
            with nvtx.annotate("run.prefill"):
                prefilled = self.runner.prefill(step.prefill)
        if step.decode:
            with nvtx.annotate(f"run.decode.b{len(step.decode)}"):
                decoded = self.runner.decode(step.decode)
        return prefilled, decoded

    def _apply(self, step: ScheduledStep, prefilled: PrefillResult, decoded: list[SampledToken]) -> None:
        sampled = [*prefilled.sampled, *decoded]
        invalid = {token.request for token in sampled if not token.is_valid}
        for chunk in step.prefill:
            request = chunk.request
            request.num_computed_tokens = chunk.stop
            request.resident.has_run = True
            self.num_prefill_tokens += chunk.stop - chunk.start
            if chunk.checkpoint is not None:
                if request in invalid:
                    self.memory.supply.release_states([chunk.checkpoint.state_slot])
                else:
                    self.scheduler.residency.keep_checkpoint(request, chunk.checkpoint)
        for scored in prefilled.scored:
            entry = self._logprobs_entry(scored.token_id, scored.logprobs)
            self.groups[scored.request.request_id].add_prompt_logprobs([entry])
            scored.request.num_prompt_logits_read += 1
        for request in step.decode:
            request.num_computed_tokens += 1
            request.resident.has_run = True
            self.num_decode_tokens += 1
        for token in sampled:
            if token.is_valid:
                self._append(token)
            else:
                self._end_with_error(token.request, "the model's logits are not numbers (NaN)")

    def _append(self, token: SampledToken) -> None:
        request, group = token.request, self.groups[token.request.request_id]
        request.tokens.append(token.token_id)
        logprobs = None if token.logprobs is None else self._logprobs_entry(token.token_id, token.logprobs)
        stop = group.add_token(request.sample_index, token.token_id, logprobs)
        request.forbidden_token_ids = group.completions[request.sample_index].forbidden_token_ids
        if stop is not None:
            self.scheduler.finish(request)
        self._note_progress(group)

    def _fail(self, step: ScheduledStep, error: Exception) -> None:
        _LOGGER.error("a forward over %d requests failed", len(step.requests), exc_info=error)
        self.scheduler.reset(step)
        if len(step.requests) == 1:
            self._end_with_error(step.requests[0], f"{type(error).__name__}: {error}")

    def _end_with_error(self, request: Request, message: str) -> None:
        group = self.groups[request.request_id]
        self.scheduler.drop(request)
        group.end(request.sample_index, Stop("error", message))
        self._note_progress(group)

    def _note_progress(self, group: RequestGroup) -> None:
        self._progressed[group.request_id] = group
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

"""A user's request: one prompt, one id, `n` samples."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hybrid_runtime.engine.completion import Completion, Stop
from hybrid_runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from hybrid_runtime.scheduling.request import Request, RequestStatus
from hybrid_runtime.speculative.adaptive import DraftBudget


@dataclass(frozen=True)
class Prompt:
    """What a request asks about: token ids, and the text they came from where there was one."""

    token_ids: tuple[int, ...]
    text: str | None


class RequestGroup:
    """The samples of one request with what their user gets to see. `requests[i]` is the row of `completions[i]`."""

    def __init__(self, request_id: str, prompt: Prompt, requests: list[Request], completions: list[Completion]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.requests = requests
        self.completions = completions
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if requests[0].wants_prompt_logprobs:
            self._prompt_logprobs = [None]
        self._arrival_time = time.monotonic()
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._finished_time: float | None = None

    @property
    def finished(self) -> bool:
        return all(completion.stop is not None for completion in self.completions)

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` would bring something."""
        return any(completion.has_news for completion in self.completions)

    @property
    def unfinished_requests(self) -> list[Request]:
        return [request for request in self.requests if request.status is not RequestStatus.FINISHED]

    @property
    def _draft_budgets(self) -> list[DraftBudget]:
        return [request.draft_budget for request in self.requests if request.draft_budget is not None]

    def mark_scheduled(self) -> None:
        """Notes that a step worked on the request."""
        if self._first_scheduled_time is None:
            self._first_scheduled_time = time.monotonic()

    def add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Appends the entries of the next prompt tokens."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs.extend(entries)

    def restore(self) -> None:
        """After an exception at any point: makes requests and completions agree on the tokens there are.

        The requests that go on are waiting afterwards and own nothing.
        """
        self.completions = [completion.replayed() for completion in self.completions]
        for request, completion in zip(self.requests, self.completions, strict=True):
            request.start_over(completion.num_tokens)
            if completion.stop is not None:
                request.status = RequestStatus.FINISHED
        if self._prompt_logprobs is not None:
            self.requests[0].num_prompt_logits_read = len(self._prompt_logprobs) - 1
        self._note_end()

    def add_token(self, sample_index: int, token_id: int, logprobs: TokenLogprobs | None) -> Stop | None:
        """Takes a sample's next token; returns why the sample ends with it, or None."""
        if self._first_token_time is None:
            self._first_token_time = time.monotonic()
        stop = self.completions[sample_index].append(token_id, logprobs)
        if stop is not None:
            self._note_end()
        return stop

    def end(self, sample_index: int, stop: Stop) -> None:
        """Ends a sample from outside; with an error where the tokenizer cannot decode what is left."""
        completion = self.completions[sample_index]
        try:
            completion.end(stop)
        except Exception as error:  # the tokenizer's
            completion.end(Stop("error", f"{type(error).__name__}: {error}"))
        self._note_end()

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output([completion.output() for completion in self.completions])

    def take_delta(self) -> RequestOutput:
        """What came since the last call."""
        return self._output([completion.take_delta() for completion in self.completions])

    def _note_end(self) -> None:
        if self._finished_time is None and self.finished:
            self._finished_time = time.monotonic()

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        hit = self.requests[0].prefix_hit
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            outputs=tuple(outputs),
            finished=self.finished,
            num_cached_tokens=hit.num_cached_tokens if hit else 0,
            num_kv_matched_tokens=hit.num_kv_matched_tokens if hit else 0,
            checkpoint_origin=hit.checkpoint_origin if hit else None,
            cache_miss_reason=hit.cache_miss_reason if hit else None,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                first_scheduled_time=self._first_scheduled_time,
                first_token_time=self._first_token_time,
                finished_time=self._finished_time,
                num_preemptions=sum(request.num_preemptions for request in self.requests),
                num_draft_rounds=sum(budget.num_rounds for budget in self._draft_budgets),
                num_drafted_tokens=sum(budget.num_drafted_tokens for budget in self._draft_budgets),
                num_accepted_tokens=sum(budget.num_accepted_tokens for budget in self._draft_budgets),
                num_lost_states=sum(request.num_lost_states for request in self.requests),
            ),
        )

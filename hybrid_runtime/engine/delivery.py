"""What users are given: the tokens of their requests, one by one, and how each request ends."""

from __future__ import annotations

import logging

from hybrid_runtime.engine.completion import Stop
from hybrid_runtime.engine.request_group import RequestGroup
from hybrid_runtime.engine.results import RankedLogprobs, SampledToken, ScoredToken
from hybrid_runtime.outputs import TokenLogprobs, token_logprobs
from hybrid_runtime.scheduling.request import Request, RequestStatus
from hybrid_runtime.scheduling.scheduler import Scheduler
from hybrid_runtime.text.detokenizer import TokenDecoder

_LOGGER = logging.getLogger(__name__)


class Delivery:
    """Hands tokens to completions, and ends requests: for their users, and in the scheduler.

    `groups` are the unfinished requests, by their ids. `progressed` are those with something new; whoever takes it to
    the user removes them there.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: TokenDecoder | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self.groups: dict[str, RequestGroup] = {}
        self.progressed: dict[str, RequestGroup] = {}
        self.num_finished = 0

    def append(self, token: SampledToken | ScoredToken) -> None:
        """Takes the next token of a request, which may end with it. What follows the end is ignored.

        A tokenizer may fail on a token: that ends the request with an error, and must not take the others down.
        """
        if token.request.status is not RequestStatus.RUNNING:
            return  # it ended with the step before, or with an earlier token of this one
        try:
            self._append(token)
        except Exception as error:  # the tokenizer's
            _LOGGER.error("a token of request %s failed", token.request.request_id, exc_info=error)
            self.drop(token.request, f"{type(error).__name__}: {error}")

    def drop(self, request: Request, message: str) -> None:
        """Ends a request with an error; nothing of it is kept."""
        self._scheduler.drop(request)
        self.end(request, Stop("error", message))

    def end(self, request: Request, stop: Stop) -> None:
        """Ends a request for its user."""
        group = self.groups[request.request_id]
        group.end(request.sample_index, stop)
        self.note_progress(group)

    def note_progress(self, group: RequestGroup) -> None:
        """Has what is new of a request delivered; if that is its end, it is no unfinished one any more."""
        self.progressed[group.request_id] = group
        if group.finished:
            del self.groups[group.request_id]
            self.num_finished += 1

    def _append(self, token: SampledToken | ScoredToken) -> None:
        request = token.request
        group = self.groups[request.request_id]
        logprobs = None if token.logprobs is None else self._logprobs_entry(token.token_id, token.logprobs)
        if isinstance(token, ScoredToken):
            assert logprobs is not None
            group.add_prompt_logprobs([logprobs])
            request.num_prompt_logits_read += 1
            return
        request.tokens.append(token.token_id)
        stop = group.add_token(request.sample_index, token.token_id, logprobs)
        self.progressed[group.request_id] = group
        if stop is not None:
            self._scheduler.finish(request)
            self.note_progress(group)

    def _logprobs_entry(self, token_id: int, logprobs: RankedLogprobs) -> TokenLogprobs:
        decode = None if self._tokenizer is None else self._decode_token
        return token_logprobs(
            token_id, logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs, decode
        )

    def _decode_token(self, token_id: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

"""One sample as its user sees it: text, log-probabilities, and the rules by which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_runtime.outputs import CompletionOutput, FinishReason, TokenLogprobs
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.text.detokenizer import IncrementalDetokenizer, TokenDecoder
from hybrid_runtime.text.stop import StopChecker


@dataclass(frozen=True)
class Stop:
    """Why a sample ends. `stop_reason`: the stop token or stop string, or the message of an error."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Completion:
    """Collects the tokens of one sample and says when it ends.

    After each token, in this order: an end-of-sequence token, a stop token, a stop string, the length. Before
    `min_tokens` tokens only the length counts.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        max_output_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: TokenDecoder | None,
    ) -> None:
        self.index = index
        self.params = params
        self.stop: Stop | None = None
        self._prompt_token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._max_output_tokens = max_output_tokens
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._stop_checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob = 0.0
        self._text_parts: list[str] = []
        self._num_streamed_tokens = 0
        self._num_streamed_parts = 0
        self._end_was_streamed = False

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` would bring a token, text or the end."""
        return (
            len(self._token_ids) > self._num_streamed_tokens
            or len(self._text_parts) > self._num_streamed_parts
            or (self.stop is not None and not self._end_was_streamed)
        )

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Tokens that must not be chosen next: those that would end the sample before `min_tokens`."""
        return () if len(self._token_ids) >= self.params.min_tokens else tuple(self.end_token_ids)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the sample."""
        return self._eos_token_ids | self._stop_token_ids

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> Stop | None:
        """Takes the next token; returns why the sample ends with it, or None."""
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs[token_id].logprob
        may_stop = len(self._token_ids) >= self.params.min_tokens
        stop = self._stop_by_token(token_id) if may_stop else None
        if stop is None or self.params.include_stop_str_in_output:
            string = self._append_text(token_id, may_stop=may_stop)
            if stop is None and string is not None:
                stop = Stop("stop", string)
        if stop is None and len(self._token_ids) == self._max_output_tokens:
            stop = Stop("length")
        if stop is not None:
            self.end(stop)
        return self.stop

    def replayed(self) -> Completion:
        """A new one, fed with the same tokens: whole, even where `append` or `end` was interrupted on this one."""
        copy = Completion(
            self.index,
            self.params,
            self._prompt_token_ids,
            max_output_tokens=self._max_output_tokens,
            eos_token_ids=self._eos_token_ids,
            tokenizer=self._tokenizer,
        )
        wants_logprobs = self.params.logprobs is not None
        num_tokens = min(len(self._token_ids), len(self._logprobs)) if wants_logprobs else len(self._token_ids)
        try:
            for place in range(num_tokens):
                copy.append(self._token_ids[place], self._logprobs[place] if wants_logprobs else None)
            if copy.stop is None and self.stop is not None:
                copy.end(self.stop)
        except Exception as error:  # the tokenizer's
            copy.end(Stop("error", f"{type(error).__name__}: {error}"))
        copy._num_streamed_tokens = min(self._num_streamed_tokens, num_tokens)
        copy._num_streamed_parts = min(self._num_streamed_parts, len(copy._text_parts))
        copy._end_was_streamed = self._end_was_streamed
        return copy

    def end(self, stop: Stop) -> None:
        """Ends the sample and lets out the text that was held back, unless a stop string or an error ended it.

        A stop string that shows only in that text is the reason then, except of an abort.
        """
        is_cut = stop.finish_reason == "error" or isinstance(stop.stop_reason, str)
        if self._detokenizer is not None and not is_cut:
            may_stop = len(self._token_ids) >= self.params.min_tokens
            result = self._stop_checker.append(self._detokenizer.finish(), may_stop=may_stop)
            self._text_parts.append(result.text + self._stop_checker.finish())
            if result.stop is not None and stop.finish_reason != "abort":
                stop = Stop("stop", result.stop)
        self.stop = stop

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    def take_delta(self) -> CompletionOutput:
        """What came since the last call."""
        delta = self._output(self._num_streamed_tokens, self._num_streamed_parts)
        self._num_streamed_tokens = len(self._token_ids)
        self._num_streamed_parts = len(self._text_parts)
        self._end_was_streamed = self.stop is not None
        return delta

    def _stop_by_token(self, token_id: int) -> Stop | None:
        if token_id in self._eos_token_ids:
            return Stop("stop")
        return Stop("stop", token_id) if token_id in self._stop_token_ids else None

    def _append_text(self, token_id: int, *, may_stop: bool) -> str | None:
        """Adds the text of a token; returns the stop string that it completes, if any."""
        if self._detokenizer is None:
            return None
        result = self._stop_checker.append(self._detokenizer.append(token_id), may_stop=may_stop)
        self._text_parts.append(result.text)
        return result.stop

    def _output(self, first_token: int, first_part: int) -> CompletionOutput:
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self._text_parts[first_part:]),
            token_ids=tuple(self._token_ids[first_token:]),
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs[first_token:] if wants_logprobs else None,
            finish_reason=None if self.stop is None else self.stop.finish_reason,
            stop_reason=None if self.stop is None else self.stop.stop_reason,
        )

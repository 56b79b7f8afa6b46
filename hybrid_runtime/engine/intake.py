"""From what users pass to requests: prompts are encoded, options checked, checkpoint hints worked out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_runtime.engine.prompts import PromptEncoder, PromptLike, split_prompts
from hybrid_runtime.engine.request_factory import RequestFactory
from hybrid_runtime.engine.request_group import Prompt, RequestGroup
from hybrid_runtime.field_checks import invalid
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.text.chat import (
    ChatOptions,
    Message,
    find_turn_ends,
    render_chat,
    split_conversations,
    stable_prompt_length,
    turn_hints,
)

Sampling = SamplingParams | Sequence[SamplingParams] | None


class RequestIntake:
    """Makes request groups. Everything that can be wrong with a call is found before one of them is queued.

    `is_taken` says whether a request id is in use.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        factory: RequestFactory,
        *,
        vocab_size: int,
        max_model_len: int,
        min_saving: int,
        is_taken: Callable[[str], bool],
    ) -> None:
        self._tokenizer = tokenizer
        self._factory = factory
        self._encoder = PromptEncoder(tokenizer, vocab_size=vocab_size, max_model_len=max_model_len)
        self._vocab_size = vocab_size
        self._min_saving = min_saving
        self._is_taken = is_taken
        self._ids = itertools.count()

    def check(self, prompt: PromptLike, params: SamplingParams) -> Prompt:
        """The encoded prompt of one request. Raises ValueError for whatever is wrong with it or its options."""
        encoded = self._encoder.encode(prompt)
        self._check_params(params, encoded)
        return encoded

    def new_group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        is_prefill_only: bool = False,
    ) -> RequestGroup:
        """One request of a prompt and options that are checked."""
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if not self._is_taken(name))
        return self._factory.new_group(request_id, prompt, params, priority, is_prefill_only=is_prefill_only)

    def completions(
        self, prompts: PromptLike | Sequence[PromptLike], sampling_params: Sampling, sampling: Mapping[str, Any]
    ) -> list[RequestGroup]:
        """Requests for one prompt or several."""
        split = split_prompts(prompts)
        params = _params_per_prompt(sampling_params, len(split), sampling)
        encoded = [self.check(prompt, each) for prompt, each in zip(split, params, strict=True)]
        return [self.new_group(prompt, each) for prompt, each in zip(encoded, params, strict=True)]

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        options: ChatOptions,
        sampling_params: Sampling,
        sampling: Mapping[str, Any],
    ) -> list[RequestGroup]:
        """Requests for one conversation or several, with the ends of their turns as checkpoint positions."""
        if self._tokenizer is None:
            raise ValueError("a tokenizer is needed for messages: pass tokenizer=")
        conversations = split_conversations(messages)
        params = _params_per_prompt(sampling_params, len(conversations), sampling)
        checked = [self._check_chat(*pair, options) for pair in zip(conversations, params, strict=True)]
        return [self.new_group(prompt, each) for prompt, each in checked]

    def warmups(self, prompts: PromptLike | Sequence[PromptLike]) -> list[RequestGroup]:
        """Requests that only compute prompts. They leave states at the length, one before, and at the stable border."""
        encoded = [self._encoder.encode(prompt) for prompt in split_prompts(prompts)]
        groups: list[RequestGroup] = []
        for prompt in encoded:
            tail = len(prompt.token_ids) - 1
            stable = 0 if prompt.text is None else stable_prompt_length(self._tokenizer, prompt.text)
            # The state after the last token is kept when the request ends.
            params = SamplingParams(max_tokens=1, checkpoint_positions=sorted({stable, tail} - {0}))
            groups.append(self.new_group(prompt, params, is_prefill_only=True))
        return groups

    def _check_chat(
        self, conversation: list[Message], params: SamplingParams, options: ChatOptions
    ) -> tuple[Prompt, SamplingParams]:
        text = render_chat(self._tokenizer, conversation, options)
        prompt = self._encoder.encode_rendered(text)
        self._check_params(params, prompt)
        ends = find_turn_ends(self._tokenizer, conversation, text, options)
        hints = turn_hints(self._tokenizer, text, ends, min_saving=self._min_saving)
        positions = sorted({*params.checkpoint_positions, *hints})
        return prompt, dataclasses.replace(params, checkpoint_positions=positions)

    def _check_params(self, params: SamplingParams, prompt: Prompt) -> None:
        params.validate_for_vocab(self._vocab_size)
        params.validate_for_prompt(len(prompt.token_ids))
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(f"a tokenizer is needed for stop={params.stop_strings!r}: pass tokenizer=")


def _params_per_prompt(
    sampling_params: Sampling, num_prompts: int, sampling: Mapping[str, Any]
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [SamplingParams.from_kwargs(sampling_params, sampling)] * num_prompts
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise invalid("sampling_params", sampling_params, "must be a SamplingParams, one per prompt, or None")
    if len(sampling_params) != num_prompts:
        raise ValueError(f"sampling_params has {len(sampling_params)} entries for {num_prompts} prompts")
    return [SamplingParams.from_kwargs(each, sampling) for each in sampling_params]

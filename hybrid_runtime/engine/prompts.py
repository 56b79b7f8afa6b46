"""What users may pass as prompts, checked and turned into token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from numbers import Integral, Number
from typing import Any

from hybrid_runtime.engine.request_group import Prompt

PromptLike = str | Sequence[int]


def split_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several, as a list: a string or a sequence of numbers is one prompt.

    Raises ValueError if there is none.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _as_sequence(prompts)
    if items is None:
        raise ValueError(f"prompts must be a string, token ids, or a list of either, not {prompts!r}")
    if len(items) == 0:
        raise ValueError(f"prompts is empty: {prompts!r}")
    return [items] if all(isinstance(item, Number) for item in items) else list(items)


def read_prompts_file(path: str | os.PathLike[str]) -> list[PromptLike]:
    """The prompts of a JSON file: a list whose items are strings or lists of token ids.

    Raises OSError where it cannot be read, and ValueError where it holds something else.
    """
    with open(path, encoding="utf-8") as file:
        try:
            prompts = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is no JSON file that can be read: {error}") from error
    if not isinstance(prompts, list) or not all(isinstance(prompt, str | list) for prompt in prompts):
        raise ValueError(f"{os.fspath(path)} must hold a list of strings or of lists of token ids")
    return prompts


class PromptEncoder:
    """Checks prompts against a model's limits, and encodes those that are text."""

    def __init__(self, tokenizer: Any | None, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def encode(self, prompt: PromptLike) -> Prompt:
        """Token ids of a prompt, with its text if it has one.

        Raises ValueError for a prompt that is neither text nor token ids, is empty, names a token outside the
        vocabulary, is text without a tokenizer, or leaves no room for an output token.
        """
        if isinstance(prompt, str):
            return self._check_length(Prompt(self._encode_text(prompt), prompt))
        return self._check_length(Prompt(self._check_ids(prompt), None))

    def encode_rendered(self, text: str) -> Prompt:
        """As `encode`, of a text that a chat template made: it holds all special tokens that it needs."""
        return self._check_length(Prompt(self._encode_text(text, add_special_tokens=False), text))

    def _check_length(self, prompt: Prompt) -> Prompt:
        token_ids = prompt.token_ids
        if not token_ids:
            raise ValueError(f"the prompt is empty: {list(token_ids) if prompt.text is None else prompt.text!r}")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but with max_model_len={self._max_model_len} at most "
                f"{self._max_model_len - 1} leave room for an output token"
            )
        return prompt

    def _encode_text(self, text: str, **options: bool) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise ValueError(
                f"a tokenizer is needed for the text prompt {_shorten(text)}: pass tokenizer=, or token ids"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text prompt {_shorten(text)} cannot be encoded: {error}") from error
        return self._check_ids(self._tokenizer(text, **options)["input_ids"])

    def _check_ids(self, prompt: PromptLike) -> tuple[int, ...]:
        items = _as_sequence(prompt)
        if items is None:
            raise ValueError(f"a prompt must be a string or a sequence of token ids, not {prompt!r}")
        for token_id in items:
            if not _is_token_id(token_id):
                raise ValueError(f"a prompt's token ids must be integers, not {token_id!r}")
            if not 0 <= int(token_id) < self._vocab_size:
                raise ValueError(f"token id {token_id} of a prompt is outside the vocabulary 0..{self._vocab_size - 1}")
        return tuple(int(token_id) for token_id in items)


def _as_sequence(value: Any) -> Sequence[Any] | None:
    """The items of a list, tuple, range, array or tensor; None for what has no order or no items."""
    items = value.tolist() if hasattr(value, "tolist") else value
    return items if isinstance(items, Sequence) and not isinstance(items, str | bytes) else None


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")

"""Text of a token sequence that grows one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np

_REPLACEMENT = "\ufffd"  # what a decoder writes in place of bytes that are no character, or not yet
_NUM_CONTEXT_TOKENS = 6  # of the prompt
_MAX_PENDING_TOKENS = (
    8  # a character has at most 4 bytes: more pending tokens than that hold bytes that are no character
)


class TokenDecoder(Protocol):
    """What is used of a tokenizer of transformers."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class IncrementalDetokenizer:
    """Decodes the tokens that follow a prompt, giving the new text of each as soon as it cannot change any more.

    What a token adds is the difference between two decodings of a short window, without and with it. The window starts
    with tokens whose text is already out, so that decoders which strip the space at the front strip it from both.
    Tokens that end inside a character are pending, and come out with the token that completes it. The texts of all
    calls joined are the text that the tokens add to the prompt's. (One exception: a decoder with byte fallback takes
    back whole characters when invalid bytes follow them; text that is out stays.)

    The cost of a token does not depend on how many came before.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt_token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context(prompt_token_ids)  # tokens whose text is out, then the pending ones
        self._num_out = len(self._window)
        self._out_text = self._decode(self._window)
        self._num_early = 0  # characters of the window's text that are out, where these are more than `_out_text`

    def append(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now certain, which may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            if text != self._out_text:
                return self._emit(text, len(self._window))
            if self._is_without_effect(token_id):
                self._window.pop()  # it must not displace the context
            return ""
        if self._num_pending > _MAX_PENDING_TOKENS:
            return self._emit_invalid(text)
        return self._emit_early(text)

    def finish(self) -> str:
        """The text of the pending tokens, when no more follow: unfinished characters become U+FFFD."""
        return self._emit(self._decode(self._window), len(self._window))

    @property
    def _num_pending(self) -> int:
        return len(self._window) - self._num_out

    def _is_without_effect(self, token_id: int) -> bool:
        """Whether the last token of the window, which gave no text, cannot change the text of the next either.

        At the very front a token that is only a space gives none, yet it is the one whose space is stripped.
        """
        is_skipped = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return bool(self._out_text or is_skipped) or self._num_pending > _MAX_PENDING_TOKENS

    def _emit(self, text: str, num_tokens: int) -> str:
        """Lets out `text`, the decoding of the window's first `num_tokens`; they become the context of the rest."""
        new_text = text[self._num_known(text) :]
        self._num_early = 0
        if num_tokens > self._num_out:
            del self._window[: self._num_out]
            self._num_out = num_tokens - self._num_out
            self._out_text = self._decode(self._window[: self._num_out])
        return new_text

    def _emit_early(self, text: str) -> str:
        """Lets out the whole characters in front of an unfinished one, where one token holds both."""
        num_known, num_whole = self._num_known(text), len(text.rstrip(_REPLACEMENT))
        if num_whole <= num_known:
            return ""
        self._num_early = num_whole
        return text[num_known:num_whole]

    def _num_known(self, text: str) -> int:
        """How many characters at the front of the window's `text` are out already."""
        if self._num_early:
            return self._num_early
        if self._out_text.endswith(_REPLACEMENT) and not text.startswith(self._out_text):
            # The prompt ended inside a character, which is complete now.
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._out_text, text, strict=False)))
        return len(self._out_text)

    def _emit_invalid(self, text: str) -> str:
        """Lets out bytes that no further byte can make a character, so that a run of them does not grow the window."""
        for num_tokens in range(len(self._window) - 1, self._num_out, -1):
            front = self._decode(self._window[:num_tokens])
            # Between two parts that decode on their own there is no character, and the first has a successor already.
            if front + self._decode(self._window[num_tokens:]) == text:
                return self._emit(front, num_tokens)
        return ""

    def _context(self, prompt_token_ids: Sequence[int] | np.ndarray) -> list[int]:
        """The last tokens of the prompt, reaching back until they have some text."""
        num_tokens = _NUM_CONTEXT_TOKENS
        while True:
            context = [int(token_id) for token_id in prompt_token_ids[-num_tokens:]]
            if len(context) == len(prompt_token_ids) or self._decode(context):
                return context
            num_tokens *= 2

    def _decode(self, token_ids: list[int]) -> str:
        # Cleaning up would change text that is out already ("a ," becomes "a,").
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

"""Where a text can be cut so that whatever follows leaves the tokens before the cut as they are.

A tokenizer first finds its added tokens, then splits the rest into words (pre-tokenization), then each word into
tokens. Text that follows can lengthen or regroup the last word, and with some patterns the one or two before it; the
words before these stay. So a cut is safe in front of the last word, unless trying some continuations shows otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

_WINDOW = 256  # characters at the end of the text that are looked at first; doubled where that is too few
# One of each kind of character that patterns tell apart, and the letters of English contractions.
_PROBES = (*"aszdlmrtveA1 \n\r\t.'-(_<é中🙂\u0301\u200d", " a", "  ", "\n\n", " \n", "ll", "re", "ve")

Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Token:
    token_id: int
    start: int
    stop: int


def stable_end(tokenizer: Any, text: str) -> int:
    """The last character position at which no continuation of `text` moves a token border, or one before it.

    `tokenizer` is a fast tokenizer of transformers. Holds for tokenizers that split words by patterns which look at one
    character behind a word (all byte-level BPE ones). Costs a few dozen tokenizations of a short text.
    """
    size = _WINDOW
    while True:
        start = max(0, len(text) - size)
        end = start + _stable_end_in_window(tokenizer, text[start:])
        # Where the window cuts a word it may split unlike the text; that is forgotten within half a window.
        if start == 0 or end - start > size // 2:
            return _before_partial_added_token(tokenizer, text, end)
        size *= 2


def count_tokens_before(offsets: Offsets, end: int) -> int:
    """How many of a text's first tokens lie before character `end`; `offsets` are those of its whole encoding."""
    num_tokens = sum(1 for _ in takewhile(lambda span: span[1] <= end, offsets))
    while num_tokens and num_tokens == len(offsets) and tuple(offsets[num_tokens - 1]) == (0, 0):
        offsets = offsets[:-1]  # an end token that the tokenizer adds
        num_tokens -= 1
    return num_tokens


def _stable_end_in_window(tokenizer: Any, text: str) -> int:
    tokens, end = _encode(tokenizer, text)
    for probe in _PROBES:
        probed, _ = _encode(tokenizer, text + probe)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, probed, strict=False)))
        end = min(end, tokens[num_equal].start if num_equal < len(tokens) else len(text))
    if text[end:].isspace():  # a run of spaces may be split anew as a whole
        end = len(text[:end].rstrip())
    return end


def _encode(tokenizer: Any, text: str) -> tuple[list[_Token], int]:
    """The tokens of a text, and where its last word starts: at the very end behind an added token."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = [
        _Token(*each)
        for each in zip(encoding["input_ids"], *zip(*encoding["offset_mapping"], strict=True), strict=True)
    ]
    if not tokens or tokens[-1].token_id in tokenizer.get_added_vocab().values():
        return tokens, len(text)
    words = encoding.word_ids()
    if len({word for word in words if word is not None}) == 1:  # a tokenizer that does not split words
        stripped = text.rstrip()
        return tokens, max((place for place, letter in enumerate(stripped) if letter.isspace()), default=0)
    return tokens, tokens[words.index(words[-1])].start


def _before_partial_added_token(tokenizer: Any, text: str, end: int) -> int:
    """`end`, or the start of what may become an added token ("<|im_en") when more text comes."""
    for added in tokenizer.get_added_vocab():
        for size in range(min(len(added) - 1, len(text)), 0, -1):
            if text.endswith(added[:size]):
                end = min(end, len(text) - size)
                break
    return end

"""Where a text can be cut so that whatever follows leaves the tokens before the cut as they are.

A tokenizer first finds its added tokens, then splits the rest into words (pre-tokenization), then each word into
tokens. Text that follows can lengthen or regroup the last word, and with some patterns the one or two before it; the
words before these stay. So a cut is safe in front of the last word, unless trying some continuations shows otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

_WINDOW = 256  # characters at the end of the text that are looked at first; doubled where that is too few
_MAX_WINDOW = 4096  # a last word of about that length has no border worth the search
# One of each kind of character that patterns tell apart, and the letters of English contractions.
_PROBES = (*"aszdlmrtveA1 \n\r\t.'-(_<é中🙂\u0301\u200d", " a", "  ", "\n\n", " \n", "ll", "re", "ve")
_BETWEEN_WORDS = re.compile(r"(?<=\S)\s+(?=\S)")

Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Encoding:
    token_ids: list[int]
    offsets: Offsets
    words: list[int | None]  # the word that each token belongs to

    def border(self, num_tokens: int) -> int:
        """A character position that has exactly the first `num_tokens` tokens before it, and no part of others.

        Offsets may leave spaces out, and tokens of one character share its place.
        """
        before = self.offsets[num_tokens - 1][1] if num_tokens else 0
        return min(before, self.offsets[num_tokens][0])


def stable_end(tokenizer: Any, text: str) -> int:
    """The last character position at which no continuation of `text` moves a token border, or one before it.

    0 where the last word is some thousand characters long.

    `tokenizer` is a fast tokenizer of transformers. Holds for tokenizers that split words by patterns which look at one
    character behind a word (all byte-level BPE ones), and for those without words if no token has a space behind other
    characters. Costs a few dozen tokenizations of a short text.
    """
    added_vocab = tokenizer.get_added_vocab()
    text = _without_partial_added_token(added_vocab, text)
    size = _WINDOW
    while True:
        start = _window_start(text, size)
        if len(text) - start > _MAX_WINDOW:
            return 0
        end = start + _stable_end_in_window(tokenizer, added_vocab, text[start:])
        # Where the window cuts a word it may split unlike the text; that is forgotten within half a window.
        if start == 0 or end - start > size // 2:
            return end
        size *= 2


def count_tokens_before(offsets: Offsets, end: int) -> int:
    """How many of a text's first tokens lie before character `end`; `offsets` are those of its whole encoding.

    Tokens that the tokenizer adds in front count, if the text's first does.
    """
    if end == 0:
        return 0  # such a token and a space that offsets leave out look alike
    num_tokens = sum(1 for _ in takewhile(lambda span: span[1] <= end, offsets))
    while num_tokens and num_tokens == len(offsets) and tuple(offsets[num_tokens - 1]) == (0, 0):
        offsets = offsets[:-1]  # an end token that the tokenizer adds
        num_tokens -= 1
    return num_tokens


def _without_partial_added_token(added_vocab: Collection[str], text: str) -> str:
    """`text` up to what may become an added token ("<|im_en") when more text comes: it would end a word there.

    Upper and lower case count as equal, because added tokens may be looked for in normalized text.
    """
    lowered = [added.lower() for added in added_vocab if added]
    first_letters = {added[0] for added in lowered}  # there may be thousands of added tokens
    longest = max(map(len, lowered), default=0)
    while True:
        for size in range(min(longest - 1, len(text)), 0, -1):
            ending = text[-size:].lower()
            if ending[0] in first_letters and any(a.startswith(ending) and a != ending for a in lowered):
                text = text[:-size]
                break
        else:
            return text


def _window_start(text: str, size: int) -> int:
    """Where about `size` characters before the end start, in no number: where it starts tells how it is grouped."""
    start = max(0, len(text) - size)
    while start and text[start - 1].isnumeric():
        start -= 1
    return start


def _stable_end_in_window(tokenizer: Any, added_vocab: Mapping[str, int], text: str) -> int:
    encoding = _encode(tokenizer, text)
    token_ids = encoding.token_ids
    end = _last_word_start(encoding, added_vocab, text)
    for probe in _PROBES:
        probed = _encode(tokenizer, text + probe).token_ids
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, probed, strict=False)))
        if num_equal < len(token_ids):
            end = min(end, encoding.border(num_equal))
    if text[end:].isspace():  # a run of spaces may be split anew as a whole
        end = len(text[:end].rstrip())
    return end


def _encode(tokenizer: Any, text: str) -> _Encoding:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return _Encoding(encoding["input_ids"], encoding["offset_mapping"], encoding.word_ids())


def _last_word_start(encoding: _Encoding, added_vocab: Mapping[str, int], text: str) -> int:
    """Where the last word starts: at the very end behind an added token."""
    if not encoding.token_ids or _ends_with_added_token(encoding.token_ids[-1], added_vocab, text):
        return len(text)
    start = encoding.border(encoding.words.index(encoding.words[-1]))
    # A tokenizer that does not split at spaces.
    return max((start + gap.start() for gap in _BETWEEN_WORDS.finditer(text[start:])), default=start)


def _ends_with_added_token(last_id: int, added_vocab: Mapping[str, int], text: str) -> bool:
    """Whether it is written out there: what a tokenizer does not know may have the id of an added token, too."""
    ending = text.rstrip().lower()
    return any(token_id == last_id and ending.endswith(added.lower()) for added, token_id in added_vocab.items())

"""What an edge's tokens say, in one short line that is safe to print: prompts are arbitrary text."""

from __future__ import annotations

import re

from hybrid_runtime.cache.node import TokenArray
from hybrid_runtime.text.detokenizer import TokenDecoder

_HEAD_CHARS, _TAIL_CHARS = 80, 24
_HEAD_TOKENS, _TAIL_TOKENS = 40, 12  # decoded of a long edge; a token of text has about four characters
_HEAD_IDS, _TAIL_IDS = 8, 3
_GAP = " … "
_REPLACEMENT = "\ufffd"
_NOT_PLAIN = re.compile(r"[^ !#-\[\]-~]")


class EdgeLabels:
    """Writes the tokens of an edge: decoded and quoted where that is possible, as token ids in brackets otherwise."""

    def __init__(self, tokenizer: TokenDecoder | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tokens: TokenArray) -> str:
        """One line without control characters, the middle of a long edge left out. O(1) tokens are decoded."""
        decoded = self._decoded(tokens) if self._tokenizer is not None else None
        return token_ids_label(tokens) if decoded is None else f'"{decoded}"'

    def _decoded(self, tokens: TokenArray) -> str | None:
        if len(tokens) <= _HEAD_TOKENS + _TAIL_TOKENS:
            text = self._decode(tokens)
            if not text or len(text) <= _HEAD_CHARS + _TAIL_CHARS:
                return visible(text) if text else None
            head, tail = text, text
        else:
            # A cut may go through a character; what is left of it there says nothing about the cache.
            head = self._decode(tokens[:_HEAD_TOKENS]).rstrip(_REPLACEMENT)
            tail = self._decode(tokens[-_TAIL_TOKENS:]).lstrip(_REPLACEMENT)
            if not head and not tail:
                return None
        return visible(head[:_HEAD_CHARS]) + _GAP + visible(tail[-_TAIL_CHARS:])

    def _decode(self, tokens: TokenArray) -> str:
        """Empty where the tokenizer has no text for these tokens, or fails."""
        assert self._tokenizer is not None
        try:
            text = self._tokenizer.decode(
                tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        except Exception:  # whatever somebody's tokenizer does, the picture is still wanted
            return ""
        return text if isinstance(text, str) else ""


def token_ids_label(tokens: TokenArray) -> str:
    if len(tokens) <= _HEAD_IDS + _TAIL_IDS:
        return f"[{', '.join(map(str, tokens.tolist()))}]"
    head, tail = tokens[:_HEAD_IDS].tolist(), tokens[-_TAIL_IDS:].tolist()
    return f"[{', '.join(map(str, head))}, …, {', '.join(map(str, tail))}]"


def visible(text: str) -> str:
    r"""`text` with everything that is not a printable character written as in a string literal (`\n`, `\x1b`).

    Marks that change the direction of text count as not printable. Quotes and backslashes are escaped.
    """
    return _NOT_PLAIN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")

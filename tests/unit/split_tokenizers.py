"""Small tokenizers of the kinds that models come with, trained here: each splits, normalizes or decorates otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybrid_runtime.models.loading import TINY_CHECKPOINT

CORPUS = [
    "the cat sat on the mat and the hat; it'll be there, we're sure they've seen it, I'd say she's right, I'm not",
    "def add(self, name, price, count=1):\n    if count > 100:\n        return None\n\n\n    self.items[name] = 1234\n",
    "in 1999 there were 123456789 of them, 3.14159 each; über Äpfel, naïve façade, résumé, cafe\u0301, 한국어",
    "敏捷的狐狸 🚀🚀 と犬  two  spaces   three    four\n\n  lines\r\n\ttabs\t\tHTTPServer camelCase <html> x != y == z",
] * 3

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|[^\p{N}\s]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end_of_all|>"]


def _byte_bpe(pattern: str | None, normalizer: Any = None, post: Any = None) -> Tokenizer:
    """Byte-level BPE over words of a pattern; None: GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


def _metaspace(*, splits: bool) -> Tokenizer:
    """As converted from sentencepiece: a space in front, words start with it. `splits=False`: one word for it all."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "a  b   c    d     e" * 8], trainer)
    if not splits:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = _bos_and_eos()
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_pieces() -> Tokenizer:
    """As BERT's: lower case, no accents, split at spaces and punctuation, special tokens around."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _bos_and_eos()
    return tokenizer


def _bos_and_eos() -> Any:
    return processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])


def _with_odd_added_tokens(pattern: str) -> Tokenizer:
    """Added tokens that take the spaces around them, that only count as whole words, that are not special."""
    tokenizer = _byte_bpe(pattern)
    tokenizer.add_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("<both>", lstrip=True, rstrip=True, special=True),
            AddedToken("mat", single_word=True),
            AddedToken("  <indented>"),
            AddedToken("http"),
        ]
    )
    return tokenizer


def _lower_case_added_tokens() -> Tokenizer:
    tokenizer = _byte_bpe(LLAMA3, normalizer=normalizers.Lowercase())
    tokenizer.add_tokens([AddedToken("<call>", normalized=True)])
    return tokenizer


_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: _byte_bpe(None),
    "llama3": lambda: _byte_bpe(LLAMA3, post=_bos_and_eos()),
    "trimmed offsets": lambda: _byte_bpe(LLAMA3, post=processors.ByteLevel(trim_offsets=True)),
    "o200k": lambda: _byte_bpe(O200K),
    "digits from the right": lambda: _byte_bpe(DIGITS_FROM_THE_RIGHT),
    "nfc": lambda: _byte_bpe(LLAMA3, normalizer=normalizers.NFC()),
    "metaspace": lambda: _metaspace(splits=True),
    "no words": lambda: _metaspace(splits=False),
    "unigram": _unigram,
    "word pieces": _word_pieces,
    "odd added tokens": lambda: _with_odd_added_tokens(LLAMA3),
    "every space a word": lambda: _with_odd_added_tokens(r"\s|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"),
    "lower-case added tokens": _lower_case_added_tokens,
}
KINDS = ("bundled", *_MAKERS)


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """The transformers tokenizer of a kind; shared by all tests, which must not change it."""
    if kind == "bundled":
        return AutoTokenizer.from_pretrained(TINY_CHECKPOINT)
    return PreTrainedTokenizerFast(tokenizer_object=_MAKERS[kind]())

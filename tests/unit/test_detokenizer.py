"""Incremental detokenization against decoding the whole sequence, with tokenizers trained here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_runtime.text.detokenizer import IncrementalDetokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic , it is fine!",
    "Größe, naïve café, señor, façade; übermäßig viele Äpfel.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "敏捷的棕色狐狸跳过懒狗。今日は良い天気ですね。한국어 문장입니다.",
    "emoji 😀 🚀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 and  double   spaces\n\ttabs",
] * 3
ALPHABET = [*sorted(set("".join(CORPUS))), "\N{DESERET CAPITAL LETTER ER}", "ß", "\ufffd", "नि"]
TEXTS = st.lists(st.sampled_from(ALPHABET) | st.characters(codec="utf-8"), max_size=30).map("".join)
SPECIAL = ["<s>", "</s>"]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE that merges seldom, so that most characters beyond ASCII are split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    """A Unigram tokenizer whose decoder strips the space at the front."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Pieces with byte tokens for everything else, decoded as Llama's tokenizer does."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "b", "中"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def decode(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def pieces_of(tokenizer, prompt, output, skip_special_tokens=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens)
    pieces = [detokenizer.append(token_id) for token_id in output]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("make_tokenizer", [byte_level, metaspace])
@given(text=TEXTS, cut=st.floats(0, 1))
def test_text_comes_out_whole_at_every_cut(make_tokenizer, text, cut):
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, output = token_ids[: int(cut * len(token_ids))], token_ids[int(cut * len(token_ids)) :]
    whole, prompt_text = decode(tokenizer, token_ids), decode(tokenizer, prompt)
    while not whole.startswith(prompt_text):  # the prompt ends inside a character, which then belongs to the output
        assert prompt_text.endswith("\ufffd")
        prompt_text = prompt_text[:-1]
    pieces = pieces_of(tokenizer, prompt, output)
    assert prompt_text + "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert "\ufffd" not in "".join(pieces)


@given(token_ids=st.lists(st.integers(0, 339), max_size=60))
@example(token_ids=[byte_level().convert_tokens_to_ids("ð")] * 40)
def test_any_byte_tokens_come_out_as_when_decoded_at_once(token_ids):
    tokenizer = byte_level()
    token_ids = [token_id % len(tokenizer) for token_id in token_ids]
    assert "".join(pieces_of(tokenizer, [], token_ids)) == decode(tokenizer, token_ids)
    pieces = pieces_of(tokenizer, [], token_ids, skip_special_tokens=False)
    assert "".join(pieces) == decode(tokenizer, token_ids, skip_special_tokens=False)


@given(words=st.lists(st.sampled_from([" ", " the", " a", "b", "中", "é", "😀", "<s>"]), max_size=30))
def test_byte_fallback(words):
    tokenizer = byte_fallback()
    vocab = tokenizer.get_vocab()
    token_ids = []
    for word in words:
        piece = word.replace(" ", "▁")
        token_ids += [vocab[piece]] if piece in vocab else [vocab[f"<0x{byte:02X}>"] for byte in word.encode()]
    assert "".join(pieces_of(tokenizer, [], token_ids)) == decode(tokenizer, token_ids)


def test_a_character_is_held_back_until_it_is_complete():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("𐐡x", add_special_tokens=False)
    assert len(token_ids) == 5
    assert pieces_of(tokenizer, [], token_ids) == ["", "", "", "𐐡", "x", ""]
    assert pieces_of(tokenizer, [], token_ids[:2]) == ["", "", "\ufffd"]
    assert pieces_of(tokenizer, token_ids[:2], token_ids[2:]) == ["", "𐐡", "x", ""]


def test_a_word_keeps_its_space_behind_the_prompt():
    tokenizer = metaspace()
    prompt, output = (tokenizer.encode(text, add_special_tokens=False) for text in ("The quick", "brown fox"))
    assert "".join(pieces_of(tokenizer, prompt, output)) == " brown fox"
    assert "".join(pieces_of(tokenizer, [], output)) == "brown fox"
    # Special tokens have no text; they must not hide the words before them.
    assert "".join(pieces_of(tokenizer, [*prompt, *[0] * 20], output)) == " brown fox"
    assert "".join(pieces_of(tokenizer, prompt, [*[1] * 20, *output])) == " brown fox"


class CountingDecoder:
    """Passes calls on to a tokenizer and remembers how many tokens they had."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sizes = []

    def decode(self, token_ids, **options):
        self.sizes.append(len(token_ids))
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize(
    "unit",
    ["word ", "😀", "</s>", "\udcf0"],  # the last stands for a byte that is no character
)
def test_the_cost_of_a_token_does_not_grow(unit):
    tokenizer = byte_level()
    invalid = [tokenizer.convert_tokens_to_ids("ð")]
    unit_ids: list[Any] = invalid if unit == "\udcf0" else tokenizer.encode(unit, add_special_tokens=False)
    token_ids = unit_ids * 300
    decoder = CountingDecoder(tokenizer)
    detokenizer = IncrementalDetokenizer(decoder, range(5, 100))
    for token_id in token_ids:
        detokenizer.append(token_id)
    assert max(decoder.sizes) <= 24
    assert sum(decoder.sizes) <= 60 * len(token_ids)

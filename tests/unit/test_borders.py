"""No text that follows changes the tokens before a stable border; and the border is not needlessly early."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_runtime.text.borders import count_tokens_before, stable_end
from hybrid_runtime.text.chat import stable_prompt_length, turn_hints
from tests.unit.split_tokenizers import KINDS, tokenizer_of

PIECES = [
    *("the", " cat", "it", "'", "l", "ll", "r", "e", " we", "'ve", "S", "A", "b", "x", "HTTP", "Server"),
    *("1", "23", "4567", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", ".", ";", " (", ")", " =", "=\n", "…", "ﬁ"),
    *("é", "e\u0301", "\u0301", "ü", "\u0338", " 한", "\u1112", "\u1161", "\u11ab", "敏捷", "🚀", "\u200d"),
    *("<", "|", "im", "_end", "|>", "<|im_end|>", "<|im_start|>", "<|im_en", "_of_all", "<s>", "</s>"),
    *(
        "<left>",
        " <le",
        "<both>",
        "<bo",
        " <right>",
        "mat",
        " mat",
        "ht",
        "tp",
        "  <indented>",
        "  <in",
        "<CALL>",
        "<Ca",
    ),
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
"""Texts of what tokenizers treat in their own ways, or begin to."""

SEAMS = [
    ("it'l", "l be"),
    ("they'", "ve"),
    ("12345", "6"),
    ("a" + "1" * 301, "1"),
    ("two  ", " spaces"),
    ("end\n", "\n"),
    ("x =\n", "\n  y"),
    ("cafe", "\u0301 x"),
    ("\u1112\u1161", "\u11ab"),
    ("<|im_en", "d|>"),
    ("a   <|im_en", "d|>"),  # the spaces, too, are split otherwise where an added token ends the word
    (" \n <|im_end|", "> "),
    ("a\n<bo", "th>"),
    ("a\n\n\n", "\n<both>"),
    ("mat", "s"),
    ("a <right>", "   b"),
    ("'<CAL", "L>"),
    ("https", "://"),
    ("", "a"),
    ("<|im_end|>\n", "\n"),
]


def ids_of(kind: str, text: str) -> list[int]:
    return list(tokenizer_of(kind)(text)["input_ids"])


def check_border(kind: str, text: str, continuation: str) -> None:
    num_stable = stable_prompt_length(tokenizer_of(kind), text)
    before, after = ids_of(kind, text), ids_of(kind, text + continuation)
    assert num_stable <= len(before)
    assert after[:num_stable] == before[:num_stable], (num_stable, text, continuation)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(20, settings().max_examples // 5))
@given(text=texts, continuation=texts)
def test_what_follows_changes_no_token_before_the_border(kind: str, text: str, continuation: str) -> None:
    check_border(kind, text, continuation)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(20, settings().max_examples // 5))
@given(text=texts, place=st.integers(0, 60))
@example(text="a  " * 200 + "b", place=600)
def test_wherever_a_text_is_cut(kind: str, text: str, place: int) -> None:
    check_border(kind, text[:place], text[place:])


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_seams(kind: str) -> None:
    for text, continuation in SEAMS:
        check_border(kind, text, continuation)
        check_border(kind, "the cat sat " * 25 + text, continuation)  # longer than what is looked at first


@pytest.mark.parametrize("kind", ["llama3", "o200k", "digits from the right", "no words"])
@pytest.mark.parametrize("letter", ["a", " ", "\n", "7", "="])
def test_a_run_of_one_character_longer_than_what_is_looked_at_first(kind: str, letter: str) -> None:
    for count in (400, 401, 402):
        check_border(kind, "the " + letter * count, letter + "b")


@pytest.mark.parametrize("kind", ["llama3", "o200k", "digits from the right"])
def test_a_number_longer_than_what_is_looked_at_first_is_grouped_from_its_start(kind: str) -> None:
    """ "10" is two tokens here, "100" one."""
    for rest in ("", "1", "10"):
        check_border(kind, "the " + "100" * 134 + rest, "0b")


def test_a_word_without_end_has_no_border() -> None:
    """It would have to be looked at as a whole, dozens of times."""
    tokenizer = tokenizer_of("llama3")
    for letter in ("a", "7", "="):
        assert stable_end(tokenizer, "the cat " + letter * 10_000) == 0
    assert stable_end(tokenizer, "a" * 10_000 + " the cat") == 10_004


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "You are a helpful assistant. Answer briefly and truthfully.",
        "def add(self, name, price):\n    self.items[name] = price",
        "In 1999 there were 12345 of them, in 2001 some more.",
        "the cat sat on the mat and " * 40 + "the hat",
    ],
)
def test_the_border_is_at_most_a_few_words_before_the_end(kind: str, text: str) -> None:
    end = stable_end(tokenizer_of(kind), text)
    assert len(text[end:].split()) <= 2
    assert len(text) - end <= 14


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bundled"])
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "the cat<|im_end|>", "the   <|im_end|>", "the cat<|im_end|><|im_start|>"]
)
def test_right_behind_a_special_token_nothing_moves(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert stable_end(tokenizer, text) == len(text)
    num_end_tokens = int(ids_of(kind, text)[-1] == tokenizer.convert_tokens_to_ids("</s>"))
    assert stable_prompt_length(tokenizer, text) == len(ids_of(kind, text)) - num_end_tokens


def test_an_added_token_that_takes_the_spaces_behind_it_is_stable() -> None:
    assert stable_end(tokenizer_of("odd added tokens"), "a <right>") == len("a <right>")


@pytest.mark.parametrize("kind", KINDS)
def test_empty_and_very_short_texts(kind: str) -> None:
    for text in ("", " ", "\n", "a", "é", "1", "<", "🚀"):
        assert 0 <= stable_end(tokenizer_of(kind), text) <= len(text)
        for continuation in (" ", "a", "\u0301", "<|im_end|>", "2"):
            check_border(kind, text, continuation)


def test_tokens_before_a_border_are_counted_with_the_ones_in_front_and_without_the_ones_behind() -> None:
    offsets = [(0, 0), (0, 3), (3, 7), (7, 8), (7, 8), (0, 0)]  # an added start, a character in two, an added end
    assert [count_tokens_before(offsets, end) for end in (0, 2, 3, 6, 7, 8)] == [0, 1, 2, 2, 3, 5]
    assert count_tokens_before([], 0) == 0
    assert count_tokens_before([(0, 3), (0, 0), (0, 0)], 3) == 1


def test_without_a_fast_tokenizer_no_border_is_known() -> None:
    class Slow:
        is_fast = False

    assert stable_prompt_length(Slow(), "the cat") == 0
    assert turn_hints(Slow(), "the cat", [3], min_saving=1) == ()


def test_hints_name_the_turns_end_where_that_is_worth_a_state_of_its_own() -> None:
    """Behind a special token border and end are one; else the end counts if it is `min_saving` tokens further on."""
    tokenizer = tokenizer_of("llama3")
    text = "<|im_start|>the cat sat<|im_end|> and the mat"
    first = text.index(" and")
    num_first = len(tokenizer(text[:first], add_special_tokens=False)["input_ids"])
    assert turn_hints(tokenizer, text, [first], min_saving=1) == (num_first,)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    stable = count_tokens_before(offsets, stable_end(tokenizer, text))
    assert stable < len(offsets)
    assert turn_hints(tokenizer, text, [len(text)], min_saving=len(offsets) - stable) == (stable, len(offsets))
    assert turn_hints(tokenizer, text, [len(text)], min_saving=len(offsets) - stable + 1) == (stable,)
    assert turn_hints(tokenizer, text, [0], min_saving=1) == ()

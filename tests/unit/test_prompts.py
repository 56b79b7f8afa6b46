"""What may be passed as prompts, and what is refused with the value in the message."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_runtime.engine.prompts import PromptEncoder, split_prompts
from hybrid_runtime.engine.request_group import Prompt
from tests.unit.byte_bpe import encode, tokenizer

VOCAB_SIZE, MAX_LEN = 300, 10


def encoder(*, with_tokenizer: bool = True, vocab_size: int = VOCAB_SIZE) -> PromptEncoder:
    return PromptEncoder(tokenizer() if with_tokenizer else None, vocab_size=vocab_size, max_model_len=MAX_LEN)


def encode_all(prompts: Any) -> list[Prompt]:
    """What `generate` does with its argument."""
    return [encoder().encode(prompt) for prompt in split_prompts(prompts)]


def ids_of(prompts: Any) -> list[tuple[int, ...]]:
    return [prompt.token_ids for prompt in encode_all(prompts)]


def test_a_string_is_one_prompt_and_keeps_its_text():
    assert encode_all("the cat") == [Prompt(tuple(encode("the cat")), "the cat")]


def test_strings_and_ids_may_be_mixed():
    assert encode_all(["the", [5, 6], ("cat")]) == [
        Prompt(tuple(encode("the")), "the"),
        Prompt((5, 6), None),
        Prompt(tuple(encode("cat")), "cat"),
    ]


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([5, 6], [(5, 6)]),
        ((5, 6), [(5, 6)]),
        (range(3, 6), [(3, 4, 5)]),
        (deque([5, 6]), [(5, 6)]),
        ([[5, 6]], [(5, 6)]),
        ([[5], (6, 7)], [(5,), (6, 7)]),
        ([0], [(0,)]),
        ([VOCAB_SIZE - 1], [(VOCAB_SIZE - 1,)]),
        ([5] * (MAX_LEN - 1), [(5,) * (MAX_LEN - 1)]),
        (np.array([5, 6]), [(5, 6)]),
        (np.array([5, 6], dtype=np.uint8), [(5, 6)]),
        (np.array([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ([np.array([5, 6], dtype=np.int32), [7]], [(5, 6), (7,)]),
        ([np.int64(5), 6], [(5, 6)]),
    ],
    ids=repr,
)
def test_forms_of_token_ids(prompts, ids):
    encoded = ids_of(prompts)
    assert encoded == ids
    assert all(type(token_id) is int for prompt in encoded for token_id in prompt)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], r"empty: \[\]"),
        ((), r"empty: \(\)"),
        ("", "empty: ''"),
        ([""], "empty: ''"),
        ([[]], r"empty: \[\]"),
        ([[5], []], r"empty: \[\]"),
        ([[[]]], r"integers, not \[\]"),
        ([[[5]]], r"integers, not \[5\]"),
        (np.array([], dtype=np.int64), "empty"),
        (np.zeros((1, 0), dtype=np.int64), "empty"),
        (None, "None"),
        (5, "5"),
        (5.0, r"5\.0"),
        (True, "True"),
        (b"text", "b'text'"),
        ([b"text"], "b'text'"),
        ({5: 6}, r"\{5: 6\}"),
        ({5, 6}, r"\{5, 6\}"),
        (frozenset({5, 6}), r"frozenset\(\{5, 6\}\)"),  # no order
        pytest.param(iter([5, 6]), "iterator", id="iterator"),  # its repr is another in each process
        ([None], "None"),
        ([5, None], "None|not 5"),
        ([5, 6.0], r"6\.0|not 5"),
        ([[5, 6.0]], r"6\.0"),
        ([[5, "6"]], "'6'"),
        ([True, False], "True"),
        ([[5, True]], "True"),
        ([[5, np.True_]], "True"),
        (np.array([True, False]), "True"),
        (np.array([5.0, 6.0]), r"5\.0"),
        (np.array(5), "5"),
        ([np.array(5)], "5"),
        ([-1], "token id -1 .* 0..299"),
        ([[5, -7]], "token id -7 .* 0..299"),
        ([VOCAB_SIZE], "token id 300 .* 0..299"),
        ([2**70], f"token id {2**70}"),
        (np.array([5, -2]), "token id -2"),
        ([5] * MAX_LEN, "10 tokens.*max_model_len=10.* 9 "),
        ("🚀" * MAX_LEN, "tokens.*max_model_len=10"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_with_its_value(prompts, message):
    with pytest.raises(ValueError, match=message):
        encode_all(prompts)


@pytest.mark.parametrize("prompts", [torch.tensor([5, 6]), [torch.tensor([5, 6])], torch.tensor([[5, 6]])], ids=repr)
def test_a_tensor_is_either_taken_for_its_ids_or_refused_as_a_value(prompts):
    with suppress(ValueError):
        assert ids_of(prompts) == [(5, 6)]


@pytest.mark.parametrize("prompts", [torch.tensor([5.0]), torch.tensor(5), [torch.tensor(5)]], ids=repr)
def test_a_tensor_of_something_else_is_refused_as_a_value(prompts):
    with pytest.raises(ValueError, match="5"):
        ids_of(prompts)


def test_text_needs_a_tokenizer_and_the_message_is_short():
    with pytest.raises(ValueError, match="tokenizer is needed for the text prompt 'the cat'"):
        encoder(with_tokenizer=False).encode("the cat")
    with pytest.raises(ValueError, match="tokenizer is needed") as refusal:
        encoder(with_tokenizer=False).encode("x" * 100_000)
    assert len(str(refusal.value)) < 200
    assert encoder(with_tokenizer=False).encode([5, 6]) == Prompt((5, 6), None)


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_no_way_around_the_vocabulary():
    token_ids = encode("the cat")
    with pytest.raises(ValueError, match=f"token id {token_ids[0]} .* 0..{token_ids[0] - 1}"):
        encoder(vocab_size=token_ids[0]).encode("the cat")


def test_text_that_is_no_valid_unicode_is_refused_as_a_value():
    with pytest.raises(ValueError, match=r"ud800|surrogate"):
        encoder().encode("the \ud800 cat")


def test_a_prompt_is_not_shared_with_the_caller():
    ids = np.array([5, 6])
    prompt = encoder().encode(ids)  # type: ignore[arg-type]  # arrays are sequences in all that matters
    ids[:] = 9
    assert prompt.token_ids == (5, 6)

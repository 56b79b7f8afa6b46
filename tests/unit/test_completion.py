"""When a sample ends, what text it shows, and what its deltas add up to, with a small byte-level tokenizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.engine.completion import Completion, Stop
from hybrid_runtime.outputs import CompletionOutput, Logprob, TokenLogprobs
from hybrid_runtime.sampling_params import SamplingParams
from tests.unit.byte_bpe import EOS, encode, tokenizer

PROMPT = "say: "


def completion(*, max_output_tokens: int = 1000, with_tokenizer: bool = True, **sampling: Any) -> Completion:
    return Completion(
        0,
        SamplingParams(**{"max_tokens": None, **sampling}),
        tuple(encode(PROMPT)),
        max_output_tokens=max_output_tokens,
        eos_token_ids=frozenset({EOS}),
        tokenizer=tokenizer() if with_tokenizer else None,
    )


def feed(sample: Completion, token_ids: list[int]) -> list[int]:
    """Appends tokens until the sample ends; returns those that were taken."""
    for count, token_id in enumerate(token_ids, start=1):
        stop = sample.append(token_id, None)
        assert stop is sample.stop
        if stop is not None:
            return token_ids[:count]
    return token_ids


def reasons(sample: Completion) -> tuple[str | None, int | str | None]:
    output = sample.output()
    return output.finish_reason, output.stop_reason


def test_text_and_tokens_of_a_sample_that_goes_on():
    sample = completion()
    feed(sample, encode("the cat"))
    output = sample.output()
    assert (output.text, output.token_ids) == ("the cat", tuple(encode("the cat")))
    assert not output.finished
    assert reasons(sample) == (None, None)
    assert output.logprobs is output.cumulative_logprob is None


def test_end_of_text_ends_a_sample_and_is_a_token_but_no_text():
    sample = completion()
    taken = feed(sample, [*encode("the cat"), EOS, *encode(" sat")])
    assert taken[-1] == EOS
    assert reasons(sample) == ("stop", None)
    assert sample.output().text == "the cat"
    assert sample.output().token_ids == tuple(taken)


def test_end_of_text_is_a_token_like_any_other_if_ignored():
    sample = completion(ignore_eos=True)
    tokens = [*encode("the"), EOS, *encode(" cat")]
    assert feed(sample, tokens) == tokens
    assert not sample.output().finished
    assert sample.output().text == "the cat"  # special tokens have no text
    assert sample.forbidden_token_ids == ()


@pytest.mark.parametrize(("include", "text"), [(False, "the"), (True, "the cat")])
def test_a_stop_token_ends_a_sample_and_is_shown_only_if_asked_for(include, text):
    the, cat = encode("the"), encode(" cat")
    sample = completion(stop_token_ids=[cat[-1]], include_stop_str_in_output=include)
    taken = feed(sample, [*the, *cat, *the])
    assert taken == [*the, *cat]
    assert reasons(sample) == ("stop", cat[-1])
    shown = tokenizer().decode([*the, *(cat if include else cat[:-1])])
    assert sample.output().text == shown
    assert shown == text or len(cat) > 1


def test_a_stop_token_that_is_also_end_of_text_counts_as_the_latter_unless_ignored():
    for ignore_eos, reason in ((False, None), (True, EOS)):
        sample = completion(stop_token_ids=[EOS], ignore_eos=ignore_eos)
        feed(sample, [*encode("the"), EOS])
        assert reasons(sample) == ("stop", reason)


def test_the_length_ends_a_sample():
    tokens = encode("the cat sat on the mat")
    sample = completion(max_output_tokens=3)
    assert feed(sample, tokens) == tokens[:3]
    assert reasons(sample) == ("length", None)
    assert sample.output().text == tokenizer().decode(tokens[:3])


def test_an_end_at_the_very_last_token_is_a_stop_and_no_length():
    tokens = [*encode("the"), EOS]
    sample = completion(max_output_tokens=len(tokens))
    feed(sample, tokens)
    assert reasons(sample) == ("stop", None)
    tokens = encode("the cat")
    sample = completion(max_output_tokens=len(tokens), stop="cat")
    feed(sample, tokens)
    assert reasons(sample) == ("stop", "cat")


@pytest.mark.parametrize(("include", "text"), [(False, "the c"), (True, "the cat sa")])
def test_a_stop_string_across_token_borders(include, text):
    tokens = [token for letter in "the cat sat on" for token in encode(letter)]
    sample = completion(stop=["at sa", "never"], include_stop_str_in_output=include)
    taken = feed(sample, tokens)
    assert tokenizer().decode(taken) == "the cat sa"
    assert reasons(sample) == ("stop", "at sa")
    assert sample.output().text == text
    assert sample.output().token_ids == tuple(taken)


def test_a_stop_string_in_the_middle_of_a_token_cuts_its_text():
    (token,) = encode(" the")
    for include, text in ((False, " t"), (True, " th")):
        sample = completion(stop="h", include_stop_str_in_output=include)
        feed(sample, [token])
        assert (sample.output().text, *reasons(sample)) == (text, "stop", "h")


def test_text_that_may_begin_a_stop_string_is_held_back_and_let_out_at_the_end():
    sample = completion(stop="cat!")
    feed(sample, encode("the cat"))
    assert sample.take_delta().text == "the "
    sample.end(Stop("abort"))
    assert sample.take_delta().text == "cat"
    assert sample.output().text == "the cat"


@pytest.mark.parametrize("end", ["length", "eos", "stop token"])
def test_held_back_text_is_let_out_however_the_sample_ends(end):
    tokens = encode("the cat")
    last = {"length": [], "eos": [EOS], "stop token": encode("!")}[end]
    sample = completion(
        stop="cat!!", stop_token_ids=encode("!"), max_output_tokens=len(tokens) if end == "length" else 99
    )
    feed(sample, [*tokens, *last])
    assert sample.stop is not None
    assert sample.output().text == "the cat"


def test_text_behind_a_stop_string_never_shows():
    sample = completion(stop=["a", "b"], include_stop_str_in_output=True)
    feed(sample, encode(" cat"))
    sample_text = sample.output().text
    assert sample_text == " ca"
    assert sample.take_delta().text == sample_text


def test_a_character_comes_out_whole_or_as_a_replacement_when_it_stays_unfinished():
    tokens = encode("🦊")
    assert len(tokens) == 3
    sample = completion()
    for token in tokens[:-1]:
        sample.append(token, None)
        assert sample.output().text == ""
    sample.append(tokens[-1], None)
    assert sample.output().text == "🦊"

    cut = completion(max_output_tokens=len(tokens) - 1)
    feed(cut, tokens)
    assert reasons(cut) == ("length", None)
    assert set(cut.output().text) == {"\ufffd"}


def test_a_stop_string_of_several_bytes_per_character():
    sample = completion(stop="🦊と")
    feed(sample, encode("naïve 🦊🚀🦊と犬"))
    assert (sample.output().text, *reasons(sample)) == ("naïve 🦊🚀", "stop", "🦊と")


def test_before_min_tokens_nothing_but_the_length_ends_a_sample():
    tokens = encode("t") * 2 + [EOS] + encode("cat") + [EOS]
    sample = completion(min_tokens=4, stop="tt")
    taken = feed(sample, tokens)
    assert taken == tokens
    assert reasons(sample) == ("stop", None)

    sample = completion(min_tokens=4, max_output_tokens=2, stop="tt")
    feed(sample, tokens)
    assert reasons(sample) == ("length", None)


def test_a_stop_string_that_ended_before_min_tokens_is_passed_over_and_found_again_later():
    letters = [token for letter in "xx.xx.x" for token in encode(letter)]
    sample = completion(min_tokens=3, stop="xx")
    assert feed(sample, letters) == letters[:5]
    assert (sample.output().text, *reasons(sample)) == ("xx.", "stop", "xx")


def test_ends_are_forbidden_until_min_tokens_are_there():
    sample = completion(min_tokens=2, stop_token_ids=[7, 9])
    token = encode("t")[0]
    assert sorted(sample.forbidden_token_ids) == [EOS, 7, 9]
    sample.append(token, None)
    assert sorted(sample.forbidden_token_ids) == [EOS, 7, 9]
    sample.append(token, None)
    assert sample.forbidden_token_ids == ()
    assert sorted(completion(min_tokens=1, stop_token_ids=[7], ignore_eos=True).forbidden_token_ids) == [7]
    assert completion().forbidden_token_ids == ()


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    sample = completion(with_tokenizer=False, stop_token_ids=[9])
    assert feed(sample, [5, 6, 9, 7]) == [5, 6, 9]
    output = sample.output()
    assert (output.text, output.token_ids, *reasons(sample)) == ("", (5, 6, 9), "stop", 9)
    assert sample.take_delta().token_ids == (5, 6, 9)


def entry(token_id: int, logprob: float) -> TokenLogprobs:
    return {token_id: Logprob(logprob, 1, None), token_id + 1: Logprob(logprob - 1, 2, None)}


def test_logprobs_are_kept_per_token_and_summed():
    sample = completion(logprobs=1, max_output_tokens=3)
    for token, logprob in zip([5, 6, 7], [-0.5, -1.25, -2.0], strict=True):
        sample.append(token, entry(token, logprob))
        if token == 6:
            first = sample.take_delta()
    output, second = sample.output(), sample.take_delta()
    assert output.logprobs == [entry(5, -0.5), entry(6, -1.25), entry(7, -2.0)]
    assert output.cumulative_logprob is not None
    assert math.isclose(output.cumulative_logprob, -3.75)
    assert first.logprobs == output.logprobs[:2]
    assert second.logprobs == output.logprobs[2:]
    assert first.cumulative_logprob == -1.75  # of everything so far, also in a delta
    assert second.cumulative_logprob == -3.75


def test_a_sample_has_news_until_its_end_was_taken():
    sample = completion()
    assert not sample.has_news
    sample.append(encode("t")[0], None)
    assert sample.has_news
    sample.take_delta()
    assert not sample.has_news
    sample.end(Stop("error", "it broke"))
    assert sample.has_news
    delta = sample.take_delta()
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("", (), "error", "it broke")
    assert not sample.has_news


def visible_text(token_ids: list[int]) -> str:
    """The text of tokens of a valid string, without a character that is not complete."""
    return tokenizer().decode(token_ids, clean_up_tokenization_spaces=False).rstrip("\ufffd")


def expected(
    token_ids: list[int], stops: list[str], include: bool, min_tokens: int, max_tokens: int
) -> tuple[int, str, str | None]:
    """Tokens taken, text, stop string: by decoding everything anew after each token."""
    length_before = 0
    for count in range(1, min(len(token_ids), max_tokens) + 1):
        text = visible_text(token_ids[:count])
        ends = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(length_before + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends and count >= min_tokens:
            end, _, stop = min(ends)
            return count, text[: end if include else end - len(stop)], stop
        length_before = len(text)
    taken = min(len(token_ids), max_tokens)
    return taken, tokenizer().decode(token_ids[:taken], clean_up_tokenization_spaces=False), None


PIECES = ["a", "t", "h", " ", "ü", "犬", "🚀", "🦊", "the cat"]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)
STOPS = st.lists(st.text("ath 🚀🦊犬ü", min_size=1, max_size=3), max_size=3, unique=True)


@given(TEXTS, STOPS, st.booleans(), st.integers(0, 6), st.integers(1, 12), st.data())
def test_text_stops_and_deltas_equal_those_of_decoding_everything_anew(
    text, stops, include, min_tokens, max_tokens, data
):
    token_ids = encode(text)
    sample = completion(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_output_tokens=max_tokens
    )
    deltas: list[CompletionOutput] = []
    for token_id in token_ids:
        stop = sample.append(token_id, None)
        if data.draw(st.booleans()):
            deltas.append(sample.take_delta())
        if stop is not None:
            break
    if sample.stop is None:
        sample.end(Stop("abort"))
    deltas.append(sample.take_delta())

    num_taken, shown, hit = expected(token_ids, stops, include, min_tokens, max_tokens)
    output = sample.output()
    assert output.token_ids == tuple(token_ids[:num_taken])
    assert output.text == shown
    assert output.stop_reason == hit
    assert output.finish_reason == ("stop" if hit else "length" if num_taken == max_tokens else "abort")
    assert "".join(delta.text for delta in deltas) == output.text
    assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
    assert not sample.has_news

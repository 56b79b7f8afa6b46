"""Text in, text out, on the bundled model: stop rules, streaming, sampling options that show in the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.engine.helpers import assert_idle

PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n"


@pytest.fixture(scope="module")
def rt() -> Iterator[HybridRuntime]:
    with HybridRuntime("tiny", num_kv_slots=4000, num_state_slots=40, max_model_len=512, debug_checks=True) as runtime:
        yield runtime
        assert_idle(runtime)


def complete(rt: HybridRuntime, prompt: str = PROMPT, **sampling: Any) -> RequestOutput:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **sampling}
    return rt.generate(prompt, **options)[0]


def test_tokens_decode_to_the_text(rt: HybridRuntime) -> None:
    output = complete(rt)
    assert rt.tokenizer is not None
    whole = rt.tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids])
    assert PROMPT + output.outputs[0].text == whole
    assert output.prompt == PROMPT


@pytest.mark.parametrize("start", range(3, 60, 7))
def test_stop_string_anywhere_in_the_text(rt: HybridRuntime, start: int) -> None:
    """Wherever it lies across token borders: the text ends before it (or behind it), and no token is spent after it."""
    plain = complete(rt).outputs[0]
    stop = plain.text[start : start + 5]
    end = plain.text.find(stop)
    sample = complete(rt, stop=[stop, "never in the text"]).outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (plain.text[:end], "stop", stop)
    assert sample.token_ids == plain.token_ids[: len(sample.token_ids)]
    assert rt.tokenizer is not None
    assert stop not in rt.tokenizer.decode(sample.token_ids[:-1])
    included = complete(rt, stop=stop, include_stop_str_in_output=True).outputs[0]
    assert included.text == plain.text[: end + len(stop)]


def test_stop_token(rt: HybridRuntime) -> None:
    plain = complete(rt).outputs[0]
    token = plain.token_ids[6]
    first = plain.token_ids.index(token)
    sample = complete(rt, stop_token_ids=[token]).outputs[0]
    assert sample.token_ids == plain.token_ids[: first + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", token)
    assert rt.tokenizer is not None
    assert sample.text == rt.tokenizer.decode(plain.token_ids[:first])


def test_end_of_text(rt: HybridRuntime) -> None:
    [eos] = rt.model.spec.eos_token_ids
    forced: dict[str, Any] = {"logit_bias": {eos: 100.0}}
    sample = complete(rt, ignore_eos=False, **forced).outputs[0]
    assert (sample.token_ids, sample.text) == ((eos,), "")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    late = complete(rt, ignore_eos=False, min_tokens=5, **forced).outputs[0]
    assert late.token_ids == (*complete(rt, max_tokens=5).outputs[0].token_ids, eos)
    assert complete(rt, **forced).outputs[0].token_ids == (eos,) * 40


def test_context_limit_ends_a_request(rt: HybridRuntime) -> None:
    assert rt.tokenizer is not None
    num_prompt = len(rt.tokenizer(PROMPT).input_ids)
    options: dict[str, Any] = {"num_kv_slots": 64, "num_state_slots": 4, "compile": "off"}
    with HybridRuntime("tiny", max_model_len=num_prompt + 9, **options) as small:
        for max_tokens in (None, 100):
            sample = complete(small, max_tokens=max_tokens).outputs[0]
            assert (len(sample.token_ids), sample.finish_reason) == (9, "length")
            assert sample.token_ids == complete(rt, max_tokens=9).outputs[0].token_ids
        assert_idle(small)


@pytest.mark.parametrize("stop", [[], ["self", "\n\n", "é"]])
@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_whole_text(rt: HybridRuntime, seed: int, stop: list[str]) -> None:
    """At a temperature that yields bytes of half characters; no delta may hold one before the end."""
    options: dict[str, Any] = {
        "max_tokens": 60,
        "temperature": 2.5,
        "seed": seed,
        "stop": stop,
        "ignore_eos": True,
        "logprobs": 0,
    }
    prompt = "# Größe: 日本語 🙂\n"
    whole = rt.generate(prompt, **options)[0].outputs[0]
    deltas = [output.outputs[0] for output in rt.stream(prompt, **options)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert whole.logprobs is not None
    assert [set(entry) for delta in deltas for entry in delta.logprobs or []] == [set(e) for e in whole.logprobs]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [whole.finish_reason]


def test_options_that_change_the_choice(rt: HybridRuntime) -> None:
    plain = complete(rt).outputs[0]
    banned = plain.token_ids[0]
    assert banned not in complete(rt, logit_bias={banned: -100.0}).outputs[0].token_ids
    tokens = complete(rt, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5).outputs[0].token_ids
    assert len(set(tokens)) > len(set(plain.token_ids))
    assert complete(rt, temperature=1.0, top_k=1).outputs[0].token_ids == plain.token_ids
    assert complete(rt, temperature=1.0, top_p=1e-6).outputs[0].token_ids == plain.token_ids
    assert complete(rt, temperature=1.0, min_p=1.0).outputs[0].token_ids == plain.token_ids


def test_seeded_text_does_not_depend_on_the_batch(rt: HybridRuntime) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=2, ignore_eos=True)
    alone = [sample.text for sample in rt.generate(PROMPT, params)[0].outputs]
    assert alone[0] != alone[1]
    others = [SamplingParams(max_tokens=35, temperature=1.3, seed=s, ignore_eos=True) for s in range(6)]
    crowd = rt.generate([PROMPT[:-1]] * 3 + [PROMPT] + [PROMPT * 3] * 3, [*others[:3], params, *others[3:]])
    assert [sample.text for sample in crowd[3].outputs] == alone

"""Whatever ends a request inside an accepted run ends it where plain decoding does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from hybrid_runtime import SamplingParams
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle
from tests.speculative.scripted_drafter import PARTLY, RIGHT, ScriptedDrafter
from tests.speculative.speculative_runs import (
    KINDS,
    ROLLBACKS,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    speculating,
    texts_of,
    wide_model,
)
from tests.speculative.test_resumption import Letters

PROMPTS = random_prompts(11, [7, 4, 9])
LONG: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}


@cache
def text_of(name: str) -> list[list[int]]:
    """What the prompts give if nothing ends them; the drafters know it all, so drafts reach beyond every end."""
    with plain(name) as rt:
        return texts_of(rt.generate(PROMPTS, **LONG))


def assert_ends_alike(name: str, rollback: str, params: list[SamplingParams], **changes: Any) -> list[Any]:
    options = {"tokenizer": Letters(), **changes}
    with plain(name, **options) as rt:
        outputs = rt.generate(PROMPTS, params)
        expected = outcomes(outputs)
    drafter = ScriptedDrafter(text_of(name) + texts_of(outputs), seed=1, kinds=(RIGHT, RIGHT, PARTLY))
    with speculating(name, drafter, rollback, **options) as rt:
        found = outcomes(rt.generate(PROMPTS, params))
        assert found == expected
        assert num_accepted(rt) > 0 or max(len(output.outputs[0].token_ids) for output in outputs) < 4
        assert_content(rt)
        assert_idle(rt)
    return [sample for samples in found for sample in samples]


models = pytest.mark.parametrize(("name", "rollback"), list(zip(KINDS, ROLLBACKS, strict=True)))


@models
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_max_tokens_of_every_remainder(name: str, rollback: str, max_tokens: int) -> None:
    """Of runs of up to eight tokens: over all cases of a model from 1 to 18."""
    counts = [max_tokens, max_tokens + 6, max_tokens + 12]
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in counts]
    assert {sample[2] for sample in assert_ends_alike(name, rollback, params)} == {"length"}


@models
@pytest.mark.parametrize("max_model_len", [12, 15, 20])
def test_the_end_of_the_context(name: str, rollback: str, max_model_len: int) -> None:
    params = [SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)] * 3
    for sample in assert_ends_alike(name, rollback, params, max_model_len=max_model_len):
        assert sample[2] == "length"


@models
@pytest.mark.parametrize("place", [1, 3, 6, 11])
def test_stop_tokens_and_stop_strings(name: str, rollback: str, place: int) -> None:
    """One row ends with a token, one with a string of two tokens, one with a token that stays in the output."""
    [first, second, third] = [text[len(prompt) :] for text, prompt in zip(text_of(name), PROMPTS, strict=True)]
    string = "".join(chr(0x400 + token) for token in second[place - 1 : place + 1])
    params = [
        SamplingParams(stop_token_ids=[first[place - 1]], **LONG),
        SamplingParams(stop=[string], **LONG),
        SamplingParams(stop_token_ids=[third[place]], include_stop_str_in_output=True, **LONG),
    ]
    assert [sample[2] for sample in assert_ends_alike(name, rollback, params)] == ["stop"] * 3


@models
@pytest.mark.parametrize("min_tokens", [0, 4, 11])
def test_min_tokens_forbid_what_would_end_it(name: str, rollback: str, min_tokens: int) -> None:
    """Every third token would; sampled, so that they come up soon. Drafts name forbidden tokens all the time."""
    stops = list(range(0, 150, 3))
    params = [
        SamplingParams(max_tokens=20, temperature=temperature, seed=5, min_tokens=min_tokens, stop_token_ids=stops)
        for temperature in (0.0, 0.9, 1.2)
    ]
    for sample in assert_ends_alike(name, rollback, params):
        assert len(sample[0]) >= max(1, min_tokens)


@models
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_own_end_of_text(
    name: str, rollback: str, ignore_eos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end-of-text token of the model is one that comes sixth in the first text."""
    end = text_of(name)[0][len(PROMPTS[0]) + 5]
    model = wide_model(name)
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    monkeypatch.setattr(model.config, "eos_token_id", end)
    params = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=ignore_eos)] * 3
    samples = assert_ends_alike(name, rollback, params)
    assert ("stop" in [sample[2] for sample in samples]) == (not ignore_eos)


class Illiterate(Letters):
    """Fails on one token."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def decode(self, token_ids: list[int], **options: bool) -> str:
        if self._token_id in token_ids:
            raise ValueError("planted")
        return super().decode(token_ids, **options)


@models
@pytest.mark.parametrize("place", [3, 6])
def test_a_token_that_cannot_be_decoded(name: str, rollback: str, place: int) -> None:
    """It ends its request inside an accepted run, with an error, and none of the others."""
    bad = text_of(name)[0][len(PROMPTS[0]) + place]
    params = [SamplingParams(**LONG)] * 3
    samples = assert_ends_alike(name, rollback, params, tokenizer=Illiterate(bad))
    assert "error" in [sample[2] for sample in samples]

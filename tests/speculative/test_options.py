"""Sampling options see the same history under drafts as without, and a user the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from hybrid_runtime.outputs import TokenLogprobs
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle
from tests.speculative.scripted_drafter import CHAIN, PARTLY, RIGHT, TREE, TWINS, ScriptedDrafter
from tests.speculative.speculative_runs import (
    KINDS,
    ROLLBACKS,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    speculating,
    texts_of,
)

PROMPTS = random_prompts(21, [7, 4, 9])
ROUNDING = 1e-9  # of log-probabilities in float64: those of another history differ by parts of one
models = pytest.mark.parametrize(("name", "rollback"), list(zip(KINDS, ROLLBACKS, strict=True)))
LONG: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
CASES: dict[str, list[SamplingParams]] = {
    "penalties": [
        SamplingParams(temperature=0.0, presence_penalty=1.5, **LONG),
        SamplingParams(temperature=0.8, seed=2, frequency_penalty=1.2, **LONG),
        SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.8, presence_penalty=-0.5, **LONG),
    ],
    "bias": [
        SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: 3.1, 17: 2.9}, presence_penalty=2.0, **LONG),
        SamplingParams(temperature=0.9, seed=4, logit_bias={30: 2.0, 31: -100.0}, **LONG),
        SamplingParams(temperature=0.0, **LONG),
    ],
    "logprobs": [
        SamplingParams(temperature=0.0, logprobs=3, **LONG),
        SamplingParams(temperature=0.9, seed=5, logprobs=0, presence_penalty=1.0, logit_bias={7: 1.0}, **LONG),
        SamplingParams(temperature=1.0, seed=6, prompt_logprobs=1, logprobs=1, **LONG),
    ],
    "samples": [
        SamplingParams(temperature=0.9, seed=7, n=3, **LONG),
        SamplingParams(temperature=0.8, seed=7, n=2, logprobs=1, **LONG),
        SamplingParams(temperature=0.0, **LONG),
    ],
    "filters": [
        SamplingParams(temperature=1.2, seed=8, top_k=5, **LONG),
        SamplingParams(temperature=1.2, seed=8, top_p=0.7, min_p=0.02, **LONG),
        SamplingParams(temperature=0.5, seed=9, **LONG),
    ],
}


def assert_same_logprobs(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert _logprobs(ours).keys() == _logprobs(theirs).keys()
        assert _logprobs(ours) == pytest.approx(_logprobs(theirs), abs=ROUNDING)
        for our_sample, their_sample in zip(ours.outputs, theirs.outputs, strict=True):
            assert our_sample.cumulative_logprob == pytest.approx(their_sample.cumulative_logprob, abs=ROUNDING)


def _logprobs(output: RequestOutput) -> dict[tuple[int, int, int, int | None], float]:
    """By sample (-1: the prompt), place, token and rank."""
    lists: list[tuple[int, Sequence[TokenLogprobs | None]]] = [(-1, output.prompt_logprobs or [])]
    lists += [(sample.index, sample.logprobs or []) for sample in output.outputs]
    return {
        (index, place, token, entry.rank): entry.logprob
        for index, entries in lists
        for place, of_place in enumerate(entries)
        for token, entry in (of_place or {}).items()
    }


@models
@pytest.mark.parametrize("case", CASES)
def test_options_give_what_they_give_without_drafts(name: str, rollback: str, case: str) -> None:
    shape = CHAIN if (list(CASES).index(case) + KINDS.index(name)) % 2 else TREE
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, CASES[case])
    drafter = ScriptedDrafter(texts_of(expected), seed=4, shape=shape, kinds=(RIGHT, PARTLY, TWINS))
    with speculating(name, drafter, rollback) as rt:
        found = rt.generate(PROMPTS, CASES[case])
        assert outcomes(found) == outcomes(expected)
        assert_same_logprobs(found, expected)
        assert num_accepted(rt) > 10
        assert_content(rt)
        assert_idle(rt)


@models
def test_seeds_that_the_runtime_draws(name: str, rollback: str) -> None:
    """Requests without a seed of their own get the same ones in both runtimes."""
    params = SamplingParams(temperature=1.0, **LONG)
    with plain(name, seed=5) as rt:
        expected = rt.generate(PROMPTS, params)
    with speculating(name, ScriptedDrafter(texts_of(expected), kinds=(RIGHT,)), rollback, seed=5) as rt:
        assert outcomes(rt.generate(PROMPTS, params)) == outcomes(expected)
        assert num_accepted(rt) > 10


@models
def test_a_stream_brings_runs_of_tokens_in_order(name: str, rollback: str) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1, **LONG)
    with plain(name) as rt:
        [expected] = rt.generate(PROMPTS[:1], params)
    with speculating(name, ScriptedDrafter(texts_of([expected]), kinds=(RIGHT,)), rollback) as rt:
        deltas = [output.outputs[0] for output in rt.stream(PROMPTS[0], params)]
        assert tuple(token for delta in deltas for token in delta.token_ids) == expected.outputs[0].token_ids
        assert all(len(delta.logprobs or []) == len(delta.token_ids) for delta in deltas)
        assert max(len(delta.token_ids) for delta in deltas) > 1
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert_idle(rt)


def test_a_step_delivers_all_tokens_of_a_run() -> None:
    name, params = KINDS[0], SamplingParams(temperature=0.0, **LONG)
    with plain(name) as rt:
        [expected] = rt.generate(PROMPTS[:1], params)
    with speculating(name, ScriptedDrafter(texts_of([expected]), kinds=(RIGHT,))) as rt:
        rt.add_request(PROMPTS[0], params)
        lengths = [len(output.outputs[0].token_ids) for _ in range(20) for output in _step(rt)]
        assert (lengths[0], lengths[-1]) == (1, 16)
        assert len(lengths) <= 5
        assert_idle(rt)


def _step(rt: HybridRuntime) -> list[RequestOutput]:
    return rt.step() if rt.has_unfinished else []

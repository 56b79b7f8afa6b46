"""SamplingParams: checks, normal forms, shorthand; the entries of logprobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.outputs import CompletionOutput, Logprob, PoolStats, RequestMetrics, token_logprobs
from hybrid_runtime.sampling_params import SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None, 10**400, -2.5])
def test_a_wrong_number_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [math.nan, True, "1", 1.0, -(2**63) - 1])
def test_a_wrong_integer_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 1.01),
        ("n", 0),
        ("seed", 2**63),
        ("presence_penalty", 2.01),
        ("frequency_penalty", 2.01),
        ("repetition_penalty", 0.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", ["a", "b", "a"]),
        ("stop", 5),
        ("stop", b"a"),
        ("stop_token_ids", [1, 1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"1": 0.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
    ],
)
def test_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_several_greedy_samples_are_refused():
    with pytest.raises(ValueError, match="n must be 1"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2).n == 2


def test_edges_are_accepted():
    params = SamplingParams(
        max_tokens=None,
        min_tokens=10**6,
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=1,
        seed=-(2**63),
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1e-3,
        logit_bias={0: -100, np.int64(1): np.float32(100)},  # type: ignore[dict-item]
        logprobs=0,
        stop_token_ids=[np.int64(3)],  # type: ignore[list-item]
    )
    assert params.is_greedy
    assert params.stop_token_ids == (3,)


def test_collections_are_copied_into_normal_form():
    bias, stop = {1: 2.0}, ["a", "b"]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids={5})  # type: ignore[arg-type]
    bias[2], stop[0] = 3.0, "c"
    assert params.logit_bias == {1: 2.0}
    assert params.stop_strings == ("a", "b")
    assert params.stop_token_ids == (5,)
    assert SamplingParams(stop="ab").stop_strings == ("ab",)


def test_from_kwargs():
    base = SamplingParams(temperature=0.5, stop="x")
    params = SamplingParams.from_kwargs(base, {"max_new_tokens": 3, "top_k": 4})
    assert (params.max_tokens, params.top_k, params.temperature, params.stop_strings) == (3, 4, 0.5, ("x",))
    assert SamplingParams.from_kwargs(base, {}) is base
    assert SamplingParams.from_kwargs(None, {}) == SamplingParams()
    with pytest.raises(ValueError, match="max_tokens is given twice: 4, and as max_new_tokens 3"):
        SamplingParams.from_kwargs(None, {"max_new_tokens": 3, "max_tokens": 4})
    with pytest.raises(ValueError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_kwargs(None, {"temprature": 1})
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams.from_kwargs(None, {"max_new_tokens": 0})
    with pytest.raises(ValueError, match="sampling_params"):
        SamplingParams.from_kwargs({"top_k": 3}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"stop_token_ids": [10]}, {"logit_bias": {10: 1}}, {"logprobs": 11}, {"prompt_logprobs": 11}]
)
def test_validate_for_vocab(options):
    params = SamplingParams(**options)
    params.validate_for_vocab(11)
    with pytest.raises(ValueError, match=next(iter(options))):
        params.validate_for_vocab(10)


def test_token_logprobs_hold_the_token_and_the_top():
    entry = token_logprobs(9, -5.0, 8, [3, 4, 5], [-1.0, -2.0, -2.0], decode=str)
    assert list(entry) == [9, 3, 4, 5]
    assert entry[9] == Logprob(-5.0, 8, "9")
    assert [entry[token_id].rank for token_id in (3, 4, 5)] == [1, 2, 2]
    assert token_logprobs(3, -1.0, 1, [3], [-1.0]) == {3: Logprob(-1.0, 1, None)}
    assert token_logprobs(3, -1.0, 1, [], []) == {3: Logprob(-1.0, 1, None)}


def test_derived_values_of_outputs():
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0, first_token_time=4.0, finished_time=8.0)
    times = (metrics.time_in_queue, metrics.time_to_first_token, metrics.decode_time, metrics.latency)
    assert times == (1.0, 3.0, 4.0, 7.0)
    assert RequestMetrics(arrival_time=1.0).latency is None
    assert PoolStats(total=4, free=1, cached=2, in_use=1).usage == 0.75
    assert not CompletionOutput(0, "", ()).finished


@given(st.dictionaries(st.sampled_from([*NUMBERS, *INTEGERS]), st.floats() | st.integers() | st.booleans() | st.none()))
def test_any_values_are_taken_or_refused_with_a_value_error(options):
    try:
        params = SamplingParams(**options)
    except ValueError:
        return
    assert all(math.isfinite(getattr(params, field)) for field in NUMBERS)
    assert params.max_tokens is None or params.max_tokens >= max(1, params.min_tokens)


def test_numpy_integers_become_plain_ones() -> None:
    """In NumPy's arithmetic a later sum with a prompt's length would overflow."""
    given: dict[str, Any] = {"max_tokens": np.int8(100), "seed": np.int64(5), "n": np.uint8(2)}
    params = SamplingParams(**given)
    assert [type(value) for value in (params.max_tokens, params.seed, params.n)] == [int] * 3
    assert params.max_tokens is not None
    assert params.max_tokens + 100 == 200


def test_no_stop_may_be_said_with_none() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop_strings, params.stop_token_ids) == ((), ())


def test_the_number_of_samples_is_bounded() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, at most 16384, not 1000000000"):
        SamplingParams(n=10**9)

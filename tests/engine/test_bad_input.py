"""Every bad input gives a ValueError that names the value, before anything is queued, and changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime, RuntimeConfig, SamplingParams
from tests.parity.zoo import CASES
from tests.unit.byte_bpe import tokenizer

MODEL_LIMIT, VOCAB_SIZE, MAX_LEN = 512, 320, 48
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 3,
    "num_kv_slots": 120,
    "num_state_slots": 9,
    "debug_checks": True,
    "compile": "off",
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Mamba-2 and attention, with a vocabulary that the tokenizer fits in."""
    case = next(case for case in CASES if case.name == "granite-nope")
    return dataclasses.replace(case, options={**case.options, "vocab_size": VOCAB_SIZE}).build()


@pytest.fixture(scope="module")
def shared(model: PreTrainedModel) -> HybridRuntime:
    """A runtime that has something in its cache."""
    rt = HybridRuntime(model, tokenizer=tokenizer(), max_model_len=MAX_LEN, **OPTIONS)
    rt.generate(["the cat", "the hat"], max_tokens=3, ignore_eos=True)
    return rt


@pytest.fixture
def rt(shared: HybridRuntime) -> Iterator[HybridRuntime]:
    """The shared runtime; whatever a test does to it must leave no trace."""
    before = shared.stats()
    yield shared
    assert shared.stats() == before
    assert not shared.has_unfinished
    shared._engine.memory.check([])


ENTRIES: dict[str, Callable[..., Any]] = {
    "generate": lambda rt, prompt, **sampling: rt.generate(prompt, **sampling),
    "generate after a good one": lambda rt, prompt, **sampling: rt.generate(["the cat", prompt], **sampling),
    "stream": lambda rt, prompt, **sampling: rt.stream(prompt, **sampling),
    "add_request": lambda rt, prompt, **sampling: rt.add_request(prompt, **sampling),
}
each_entry = pytest.mark.parametrize("enter", ENTRIES.values(), ids=ENTRIES)


@each_entry
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty: ''"),
        ([], r"empty: \[\]"),
        ([5, VOCAB_SIZE], f"token id {VOCAB_SIZE} .*0..{VOCAB_SIZE - 1}"),
        ([5, -1], "token id -1"),
        ([2**40], f"token id {2**40}"),
        ([5] * MAX_LEN, f"{MAX_LEN} tokens.*max_model_len={MAX_LEN}"),
        ("the cat " * MAX_LEN, f"tokens.*max_model_len={MAX_LEN}"),
        (None, "None"),
        (7, "7"),
        (2.5, r"2\.5"),
        (b"the cat", "b'the cat'"),
        ({"prompt": "the cat"}, "{'prompt': 'the cat'}"),
        ([[2.5]], r"2\.5"),
        ([[True]], "True"),
        (np.array([1.5]), r"1\.5"),
        (torch.tensor(5), "5"),
        ("the \ud800 cat", r"ud800|surrogate"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_prompts(rt, enter, prompt, message):
    with pytest.raises(ValueError, match=message):
        enter(rt, prompt)


@each_entry
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.5),
        ("top_k", -2),
        ("top_k", 2.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_new_tokens", -3),
        ("min_tokens", 99),
        ("n", 0),
        ("seed", 2**64),
        ("seed", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 3),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("logit_bias", [5]),
        ("logprobs", -1),
        ("logprobs", VOCAB_SIZE + 1),
        ("prompt_logprobs", VOCAB_SIZE + 1),
        ("stop", 5),
        ("stop", [""]),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
    ],
    ids=repr,
)
def test_bad_sampling_values(rt, enter, field, value):
    with pytest.raises(ValueError, match=r"\w") as refusal:
        enter(rt, "the cat", **{field: value})
    assert field.replace("max_new_tokens", "max_tokens") in str(refusal.value)
    named = next(iter(value), "") if isinstance(value, dict | list) else value
    assert repr(named) in str(refusal.value)


@each_entry
def test_an_unknown_sampling_option(rt, enter):
    with pytest.raises(ValueError, match=r"no field 'temprature'.*'temperature'"):
        enter(rt, "the cat", temprature=0.5)
    with pytest.raises(ValueError, match="max_tokens is given twice: 3, and as max_new_tokens 4"):
        enter(rt, "the cat", max_tokens=3, max_new_tokens=4)


@each_entry
@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0.0}], ids=repr)
def test_sampling_params_of_a_wrong_type(rt, enter, params):
    with pytest.raises(ValueError, match="sampling_params must be") as refusal:
        enter(rt, "the cat", sampling_params=params)
    assert repr(params) in str(refusal.value)


def test_as_many_sampling_params_as_prompts(rt):
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 1 prompts"):
        rt.generate("the cat", [SamplingParams(), SamplingParams()])
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        rt.generate(["the cat", "the hat"], [SamplingParams()])
    with pytest.raises(ValueError, match="sampling_params has 0 entries for 1 prompts"):
        rt.generate([5, 6], [])
    with pytest.raises(ValueError, match=r"sampling_params must be .* not 3"):
        rt.generate(["the cat", "the hat"], [SamplingParams(), 3])


def test_a_bad_entry_behind_good_ones_queues_none_of_them(rt):
    good = SamplingParams(max_tokens=2)
    with pytest.raises(ValueError, match=f"stop_token_ids.*{VOCAB_SIZE}"):
        rt.generate(["the cat"] * 3, [good, good, SamplingParams(stop_token_ids=(VOCAB_SIZE,))])
    with pytest.raises(ValueError, match="token id -5"):
        rt.generate(["the cat", "the hat", [1, -5]], good)


def test_bad_request_ids_and_priorities(rt):
    for request_id in ("", 5, b"a", ["a"]):
        with pytest.raises(ValueError, match="request_id must be") as refusal:
            rt.add_request("the cat", request_id=request_id)
        assert repr(request_id) in str(refusal.value)
    for priority in (1.5, "high", True, None, 2**70):
        with pytest.raises(ValueError, match="priority must be") as refusal:
            rt.add_request("the cat", priority=priority)
        assert repr(priority) in str(refusal.value)


def test_an_id_that_is_in_use(model):
    with HybridRuntime(model, **OPTIONS) as rt:
        rt.add_request([5, 6], request_id="a", max_tokens=1)
        before = rt.stats()
        for _ in range(2):  # queued, then finished but not delivered
            with pytest.raises(ValueError, match="request_id 'a' is in use"):
                rt.add_request([7, 8], request_id="a")
            assert rt.stats().scheduler.num_waiting == before.scheduler.num_waiting
            rt.generate([9, 10], max_tokens=1)
            before = rt.stats()
        assert [output.request_id for output in rt.step()] == ["a"]
        assert not rt.has_unfinished


def test_text_and_stop_strings_need_a_tokenizer(model):
    with HybridRuntime(model, **OPTIONS) as rt:
        before = rt.stats()
        for enter in ENTRIES.values():
            with pytest.raises(ValueError, match=r"tokenizer is needed.*'the cat'"):
                enter(rt, "the cat")
        for call in (rt.generate, rt.stream, rt.add_request):
            with pytest.raises(ValueError, match=r"tokenizer is needed.*stop=\('x',\)"):
                call([5, 6], stop="x")
        assert rt.stats() == before
        assert not rt.has_unfinished


def test_a_tokenizer_that_knows_more_tokens_than_the_model():
    small = next(case for case in CASES if case.name == "granite-nope").build()
    with HybridRuntime(small, tokenizer=tokenizer(), **OPTIONS) as rt:
        limit = rt.model.spec.vocab_size
        assert max(tokenizer()("the cat")["input_ids"]) >= limit
        with pytest.raises(ValueError, match=rf"token id .*0\.\.{limit - 1}"):
            rt.generate("the cat")
        assert not rt.has_unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": MODEL_LIMIT + 1}, f"max_model_len={MODEL_LIMIT + 1}.*limit of {MODEL_LIMIT}"),
        ({"max_model_len": 200, "num_kv_slots": 100}, "max_model_len=200.*num_kv_slots=100"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"memory_bytes": 1000, "num_kv_slots": 100}, "100 KV slots.* 1,000 B"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"max_num_seqs": 2.0}, r"max_num_seqs must be an integer, not 2\.0"),
        ({"num_state_slots": -1}, "num_state_slots.* -1"),
        ({"seed": "x"}, "seed.*'x'"),
        ({"debug_checks": 1}, "debug_checks.* 1"),
        ({"dtype": "float8"}, "dtype.*'float8'"),
        ({"device": "tpu"}, "device.*'tpu'"),
        ({"device": "cuda:99"}, "device.*cuda:99"),
        ({"eviction": "random"}, "eviction.*'random'"),
        ({"compile": "max"}, "compile.*'max'"),
        ({"overlap": 1}, "overlap.*1"),
        ({"max_num_seq": 2}, "no field 'max_num_seq'.*'max_num_seqs'"),
        ({"config": {"seed": 1}}, r"config must be .*\{'seed': 1\}"),
    ],
    ids=repr,
)
def test_bad_runtime_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        HybridRuntime(model, **options)


def test_a_config_with_a_bad_override_stays_as_it_is(model):
    config = RuntimeConfig(seed=3)
    with pytest.raises(ValueError, match="max_num_seqs"):
        HybridRuntime(model, config, max_num_seqs=0)
    assert config == RuntimeConfig(seed=3)

"""Compiled steps are the eager ones, for every kind of mixer and any batch, and nothing is compiled once they are made.

Shapes: V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hybrid_runtime import HybridRuntime, SamplingParams
from hybrid_runtime.engine.compiled_steps import CompiledSteps
from hybrid_runtime.engine.steps import EagerSteps, Steps
from hybrid_runtime.graphs.decode_runner import DecodeRunner
from hybrid_runtime.graphs.step_graphs import batch_buckets
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory, draw_inputs
from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.kernels import compiled_kernels
from tests.engine.helpers import (
    MIXER_KINDS,
    assert_idle,
    greedy,
    poison_free_slots,
    random_tokens,
    tokens_of,
)
from tests.parity.driver import Driver, Prompt, Request
from tests.parity.zoo import CASES, FULL, LINEAR

MAX_REQUESTS = 12
ROUNDING = 1e-11  # of float64 sums over some hundred products, relative to the largest of all values


class SteppedModel:
    """What a `Driver` needs of a model, by `Steps` over the driver's own pools."""

    def __init__(self, model: HybridModel, make_steps: Callable[..., Steps]) -> None:
        self._model = model
        self._make_steps = make_steps
        self._steps: Steps | None = None
        self.last_token_R = torch.zeros(MAX_REQUESTS + 1, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def steps(self, memory: StepMemory) -> Steps:
        if self._steps is None:
            self._steps = self._make_steps(self._model, memory, self.last_token_R)
        return self._steps

    def prefill(self, inputs: PrefillInputs, memory: StepMemory) -> Tensor:
        return self.steps(memory).prefill(inputs, greedy_draw(len(inputs.logits_rows_M))).logits_BV

    def decode(self, inputs: DecodeInputs, memory: StepMemory) -> Tensor:
        steps = self.steps(memory)
        inputs = dataclasses.replace(inputs, max_context_len=steps.max_context_len)
        return steps.decode(inputs, greedy_draw(len(inputs.token_ids_B))).logits_BV


def greedy_draw(num_rows: int) -> DrawInputs:
    return draw_inputs(torch.zeros(len(DrawInputs._fields), num_rows, dtype=torch.int64))


def quietly_compiled(model: HybridModel, memory: StepMemory, last_token_R: Tensor) -> CompiledSteps:
    compilable = model.with_kernels(compiled_kernels(torch.device("cpu")))
    return CompiledSteps(compilable, memory, last_token_R, report=lambda part: None)


@cache
def reference_model(kind: str) -> Any:
    """Two layers, one of each kind, in float32."""
    full = next(case for case in CASES if case.name == MIXER_KINDS[kind])
    options = {**full.options, "num_hidden_layers": 2, "layer_types": [FULL, LINEAR]}
    options.pop("mlp_only_layers", None)
    return dataclasses.replace(full, options=options).build()


def build(kind: str, dtype: torch.dtype) -> HybridModel:
    return adapt(copy.deepcopy(reference_model(kind)).to(dtype))


class Script:
    """The same steps for any driver: prefills of all shapes, states asked for inside them, decodes of 1 to 9 rows."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._rng = np.random.default_rng(0)
        self.logits: list[Tensor] = []
        self.requests: list[Request] = []

    def run(self) -> None:
        for lengths, num_padding in (((1,), 0), ((70,), 3), ((3, 64, 1), 0), ((65, 130), 1), ((2, 2), 0)):
            prompts = [Prompt(self._start(), self._tokens(length), self._positions(length)) for length in lengths]
            self.logits += self.driver.prefill(*prompts, num_padding=num_padding)
        self.logits += self.driver.prefill(Prompt(self.requests[0], self._tokens(40)), Prompt(self.requests[1], [5]))
        for num_rows, num_padding in ((1, 0), (2, 0), (9, 0), (3, 5), (1, 1), (8, 0)):
            rows = self.requests[-num_rows:]
            self.logits.append(self.driver.decode(rows, self._tokens(num_rows), num_padding=num_padding))

    def results(self) -> list[Tensor]:
        """All logits, then all states and KV of the requests at the end."""
        slots = [request.working_slot for request in self.requests]
        slots += [slot for request in self.requests for slot in request.state_slots.values()]
        states = [tensor[slots] for layer in self.driver.state_pool.layers for tensor in layer.values()]
        tokens = torch.cat([self.driver.req_to_token[r.row, : r.length] for r in self.requests]).long()
        kv = [tensor[tokens] for layer in self.driver.kv_pool.layers for tensor in layer.values()]
        return [torch.cat(self.logits), *states, *kv]

    def _start(self) -> Request:
        self.requests.append(self.driver.start())
        return self.requests[-1]

    def _tokens(self, length: int) -> list[int]:
        return random_tokens(self._rng, length)

    def _positions(self, length: int) -> list[int]:
        return sorted({length // 3, length // 2} - {0, length})


def results(model: HybridModel, make_steps: Callable[..., Steps]) -> list[Tensor]:
    stepped: Any = SteppedModel(model, make_steps)
    script = Script(Driver(stepped, max_requests=MAX_REQUESTS, max_len=200, num_state_slots=40))
    script.run()
    return script.results()


@pytest.mark.parametrize("kind", MIXER_KINDS)
def test_compiled_equals_eager(kind: str) -> None:
    """In float64: logits of every token, all states and all KV, over every batch mix, and no graph made after."""
    model = build(kind, torch.float64)
    num_graphs = []

    def counted(*args: Any) -> Steps:
        steps = quietly_compiled(*args)
        num_graphs.append(counters["stats"]["unique_graphs"])
        return steps

    compiled, eager = results(model, counted), results(model, EagerSteps)
    assert num_graphs == [counters["stats"]["unique_graphs"]]  # none, if an earlier process left them all
    assert not any(counters["graph_break"].values())
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))


@pytest.mark.parametrize("kind", MIXER_KINDS)
def test_compiled_bfloat16_errs_at_most_twice_as_much_as_eager(kind: str) -> None:
    """Against float64 on the same weights; logits, states and KV, each as a whole (root mean square)."""
    model = build(kind, torch.bfloat16)
    exact = results(adapt_double(kind), EagerSteps)
    compiled, eager = results(model, quietly_compiled), results(model, EagerSteps)
    for place, (ours, plain, truth) in enumerate(zip(compiled, eager, exact, strict=True)):
        error, budget = (float((x.double() - truth).square().mean().sqrt()) for x in (ours, plain))
        assert error <= 2 * budget, (place, error, budget)


def adapt_double(kind: str) -> HybridModel:
    return adapt(copy.deepcopy(reference_model(kind)).to(torch.bfloat16).double())


def runtime(kind: str, **options: Any) -> HybridRuntime:
    return HybridRuntime(reference_model(kind), dtype="float64", state_dtype="float64", debug_checks=True, **options)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_closing_gives_the_pools_back(mode: str) -> None:
    with runtime("mamba2", compile=mode, max_num_seqs=2, num_kv_slots=50, num_state_slots=4, max_model_len=40) as rt:
        memory = rt._engine.memory
        pools = [weakref.ref(pool) for layer in memory.step_memory.kv_layers for pool in layer.values()]
        pools += [weakref.ref(pool) for layer in memory.step_memory.state_layers for pool in layer.values()]
        rt.generate([5, 6, 7], greedy(3))
    gc.collect()
    assert len(pools) >= 4
    assert [pool() for pool in pools] == [None] * len(pools)


@pytest.fixture(scope="module", params=MIXER_KINDS)
def compiled(request: pytest.FixtureRequest) -> Iterator[tuple[str, HybridRuntime]]:
    """A kind of mixer, and a runtime with few slots, so that rows are preempted."""
    with runtime(request.param, max_num_seqs=8, num_kv_slots=260, num_state_slots=14, max_model_len=220) as rt:
        assert isinstance(rt._engine.runner.steps, CompiledSteps)
        yield request.param, rt


def padded_runner(rt: HybridRuntime) -> DecodeRunner:
    """As captured steps have it."""
    steps = rt._engine.runner.steps
    return DecodeRunner(
        steps.decode,
        max_batch=8,
        max_context_len=steps.max_context_len,
        device=torch.device("cpu"),
        buckets=batch_buckets(8),
    )


@pytest.mark.parametrize("is_padded", [False, True])
def test_generate_gives_the_tokens_of_eager_runs(
    compiled: tuple[str, HybridRuntime], is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed lengths, hits, preemptions; with buckets, as captured steps have them, and without."""
    kind, rt = compiled
    if is_padded:
        monkeypatch.setattr(rt._engine.runner, "_decode_runner", padded_runner(rt))
    rt.reset_prefix_cache()
    rng = np.random.default_rng(8)
    prompts = [random_tokens(rng, length) for length in (1, 2, 65, 64, 130, 31)]
    prompts += [prompts[4][:100] + random_tokens(rng, 9), prompts[2]]
    max_tokens = [12, 1, 30, 9, 20, 17, 5, 40]
    with runtime(kind, compile="off", enable_prefix_cache=False, max_num_seqs=1) as solo:
        pairs = list(zip(prompts, max_tokens, strict=True))
        expected = [tokens_of(solo.generate(prompt, greedy(count)))[0] for prompt, count in pairs]
    for _ in range(2):
        poison_free_slots(rt)
        assert tokens_of(rt.generate(prompts, [greedy(count) for count in max_tokens])) == expected
    assert rt.stats().scheduler.num_preemptions > 0
    assert_idle(rt)


DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 1.3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "min_p": 0.02, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.0},
    {"temperature": 0.9, "presence_penalty": 1.5, "logprobs": 2},
    {"temperature": 1.1, "logit_bias": {7: 4.0}, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("is_padded", [False, True])
def test_tokens_drawn_in_compiled_steps_are_those_of_eager_runs(
    compiled: tuple[str, HybridRuntime], is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of options in one batch: what the step draws, and what is drawn behind it from changed logits."""
    kind, rt = compiled
    if is_padded:
        monkeypatch.setattr(rt._engine.runner, "_decode_runner", padded_runner(rt))
    rt.reset_prefix_cache()
    rng = np.random.default_rng(9)
    prompts = [random_tokens(rng, length) for length in (1, 5, 66, 64, 9, 31, 2, 17)]
    params = [
        SamplingParams(max_tokens=12 + place, seed=100 + place, ignore_eos=True, **options)
        for place, options in enumerate(DRAWN)
    ]
    with runtime(kind, compile="off", enable_prefix_cache=False, max_num_seqs=1) as solo:
        expected = [solo.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    drawn = rt.generate(prompts, params)
    assert tokens_of(drawn) == tokens_of(expected)
    assert [output.outputs[0].logprobs is None for output in drawn] == [own.logprobs is None for own in params]
    assert len({tuple(tokens) for tokens in tokens_of(drawn)}) == len(prompts)
    assert_idle(rt)

"""Aborts, interrupts, failures and preemptions in the middle of rounds: nothing leaks, and no text changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from hybrid_runtime.engine.commits import Commits
from hybrid_runtime.engine.runner import ModelRunner
from hybrid_runtime.engine.verdicts import Verdicts
from hybrid_runtime.engine.verifying import LaunchedVerify
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.scheduling.residency import Residency
from tests.engine.cache_content import assert_content
from tests.engine.helpers import assert_idle
from tests.engine.test_interrupts import interrupt_at_lines
from tests.speculative.scripted_drafter import PARTLY, RIGHT, TWINS
from tests.speculative.speculative_runs import (
    KINDS,
    MIXED,
    MIXED_LENGTHS,
    ROLLBACKS,
    TIGHT,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    scripted,
    speculating,
)

PROMPTS = random_prompts(31, MIXED_LENGTHS[:4])
PARAMS = list(MIXED[:4])
MODELS = list(zip(KINDS, ROLLBACKS, strict=True))
models = pytest.mark.parametrize(("name", "rollback"), MODELS)


@pytest.fixture(scope="module")
def truth() -> Callable[[str], list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}

    def of(name: str) -> list[RequestOutput]:
        if name not in found:
            with plain(name) as rt:
                found[name] = rt.generate(PROMPTS, PARAMS)
        return found[name]

    return of


def start(rt: HybridRuntime) -> list[str]:
    return [rt.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def drain(rt: HybridRuntime, found: dict[str, RequestOutput]) -> None:
    while rt.has_unfinished:
        found |= {output.request_id: output for output in rt.step()}


@models
@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_an_abort_costs_the_others_nothing(name: str, rollback: str, num_steps: int, truth: Any) -> None:
    with speculating(name, scripted(truth(name), seed=num_steps), rollback, **TIGHT) as rt:
        ids = start(rt)
        found: dict[str, RequestOutput] = {}
        for _ in range(num_steps):
            found |= {output.request_id: output for output in rt.step()}
        rt.abort(ids[1])
        drain(rt, found)
        aborted = found[ids[1]].outputs[0]
        expected = truth(name)[1].outputs[0].token_ids
        assert aborted.token_ids == expected[: len(aborted.token_ids)]
        others = [0, 2, 3]
        assert outcomes([found[ids[i]] for i in others]) == outcomes([truth(name)[i] for i in others])
        assert_content(rt)
        assert_idle(rt)


POINTS: dict[str, tuple[type, str]] = {
    "the commit": (ModelRunner, "commit"),
    "between verify and commit": (LaunchedVerify, "wait"),
    "amid the commit": (HybridModel, "commit"),
    "amid the verdicts": (Verdicts, "_keep"),
    "amid the KV slots": (Residency, "keep_kv"),
    "catching up": (Commits, "catch_up"),
    "amid the verify": (HybridModel, "verify_stream"),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("is_after", [False, True])
def test_an_interrupt_at_a_point_of_a_round(
    point: str, is_after: bool, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every third passage; half of them when the work of the call has been done."""
    owner, method = POINTS[point]
    name, rollback = MODELS[(list(POINTS).index(point) + is_after) % len(MODELS)]
    real, calls = getattr(owner, method), iter(range(10**6))
    options = {**TIGHT, "num_kv_slots": 80}
    with speculating(name, scripted(truth(name), seed=2, kinds=(RIGHT, PARTLY, TWINS)), rollback, **options) as rt:
        ids = start(rt)
        found: dict[str, RequestOutput] = {}
        num_interrupts = 0

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            is_due = next(calls) % 3 == 2
            if is_due and not is_after:
                raise KeyboardInterrupt
            result = real(*args, **kwargs)
            if is_due:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, method, interrupted)
        while rt.has_unfinished:
            try:
                drain(rt, found)
            except KeyboardInterrupt:
                num_interrupts += 1
                assert num_interrupts < 200
        monkeypatch.undo()
        assert num_interrupts > 0
        assert outcomes([found[i] for i in ids]) == outcomes(truth(name))
        assert_content(rt)
        assert_idle(rt)


@models
@pytest.mark.parametrize("point", ["amid the commit", "amid the verify"])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_failure_among_several_costs_nobody_a_token(
    name: str, rollback: str, point: str, is_after: bool, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes and goes; the states of the working slots are half written then."""
    owner, method = POINTS[point]
    real, calls = getattr(owner, method), iter(range(10**6))

    def failing(self: Any, inputs: Any, *args: Any) -> Any:
        is_due = next(calls) in (2, 3, 9)
        if is_due and not is_after:
            raise RuntimeError("planted")
        result = real(self, inputs, *args)
        if is_due:
            raise RuntimeError("planted")
        return result

    with speculating(name, scripted(truth(name), seed=3, kinds=(RIGHT, PARTLY)), rollback) as rt:
        ids = start(rt)
        found: dict[str, RequestOutput] = {}
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, failing)
            drain(rt, found)
        assert outcomes([found[i] for i in ids]) == outcomes(truth(name))
        assert_content(rt)
        assert_idle(rt)


@models
def test_logits_that_are_nan_end_their_request_only(
    name: str, rollback: str, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = HybridModel.verify_stream, iter(range(10**6))

    def spoilt(self: Any, inputs: Any, *args: Any) -> Any:
        x_ND = real(self, inputs, *args)
        if next(calls) == 2:
            x_ND[: inputs.num_nodes] = torch.nan
        return x_ND

    with speculating(name, scripted(truth(name), seed=3, kinds=(RIGHT, PARTLY)), rollback) as rt:
        with monkeypatch.context() as patch:
            patch.setattr(HybridModel, "verify_stream", spoilt)
            first, *others = rt.generate(PROMPTS, PARAMS)
        assert first.outputs[0].finish_reason == "error"
        assert first.outputs[0].token_ids == truth(name)[0].outputs[0].token_ids[: len(first.outputs[0].token_ids)]
        assert outcomes(others) == outcomes(truth(name)[1:])
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize(("name", "rollback", "first"), [(*MODELS[0], 3203), (*MODELS[2], 1201)])
def test_interrupts_at_lines_of_the_bookkeeping(name: str, rollback: str, first: int, truth: Any) -> None:
    """As in the test of the plain runtime: at lines with a prime distance, each time in a run from the beginning."""
    count, num_interrupts, reached = first, 0, True
    with speculating(name, scripted(truth(name), seed=4), rollback, **TIGHT) as rt:
        while reached:
            rt.reset_prefix_cache()
            ids, reached = start(rt), False
            found: dict[str, RequestOutput] = {}
            with interrupt_at_lines([count, count + 61]) as arm_again:
                while rt.has_unfinished:
                    try:
                        drain(rt, found)
                    except KeyboardInterrupt:
                        num_interrupts, reached = num_interrupts + 1, True
                        arm_again()
            assert outcomes([found[i] for i in ids]) == outcomes(truth(name)), count
            count += 5003
        assert num_accepted(rt) > 10
        assert_idle(rt)
    assert num_interrupts > 5


def test_a_stream_that_is_left_ends_its_request(truth: Any) -> None:
    name = KINDS[0]
    with speculating(name, scripted(truth(name), kinds=(RIGHT,))) as rt:
        stream = rt.stream(PROMPTS[0], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
        next(stream)
        next(stream)
        stream.close()
        assert not rt.has_unfinished
        assert_content(rt)
        assert_idle(rt)

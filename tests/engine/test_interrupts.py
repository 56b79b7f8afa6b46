"""Interrupts at any line of the runtime: nothing is lost, nothing wrong is kept, the runtime stays usable."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hybrid_runtime
from hybrid_runtime import HybridRuntime, SamplingParams
from tests.engine.helpers import assert_idle, random_tokens, runtime_of

PACKAGE = str(Path(hybrid_runtime.__file__).parent)
BOOKKEEPING = tuple(f"{PACKAGE}/{part}" for part in ("cache/", "engine/", "memory/", "scheduling/", "runtime.py"))
ENTRIES = ("step", "generate")
STRIDE = 997
"""Interrupts are tried at lines with this distance: prime, so that they land at other places of each step."""


@contextmanager
def interrupt_at_lines(counts: Sequence[int], entries: Sequence[str] = ENTRIES) -> Iterator[Callable[[], None]]:
    """Raises KeyboardInterrupt before each of the `counts`-th lines that run inside the `entries` of `HybridRuntime`.

    Yields a function to be called after each interrupt, because an exception in a trace function ends the tracing. The
    one line that is passed over is the return from `step`: nothing can give back what an interrupt takes on its way to
    the caller.
    """
    state = {"lines": 0, "inside": 0}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(BOOKKEEPING):
            return None
        if code.co_name in entries and code.co_filename.endswith("runtime.py"):
            state["inside"] += {"call": 1, "return": -1}.get(event, 0)
        if event == "line" and state["inside"]:
            if linecache.getline(code.co_filename, frame.f_lineno).strip() == "return outputs":
                return trace
            state["lines"] += 1
            if state["lines"] in counts:
                raise KeyboardInterrupt
        return trace

    def arm() -> None:
        state["inside"] = 0
        sys.settrace(trace)

    previous = sys.gettrace()
    arm()
    try:
        yield arm
    finally:
        sys.settrace(previous)


def _drive(rt: HybridRuntime, tokens: dict[str, Any]) -> None:
    while rt.has_unfinished:
        for output in rt.step():
            tokens[output.request_id] = [(s.token_ids, s.finish_reason, s.logprobs) for s in output.outputs]


@pytest.mark.parametrize(("distance", "overlap"), [(0, False), (7, False), (60, False), (7, True)])
def test_interrupts_at_any_line_change_no_token(distance: int, overlap: bool) -> None:
    """The loop is driven on after each interrupt; all requests end, and are delivered, as if there had been none."""
    rng = np.random.default_rng(31)
    prompts = [random_tokens(rng, length) for length in (12, 1, 14, 9)]
    params = [
        SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.9, seed=6, n=2, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0),
    ]
    ids = [str(index) for index in range(len(prompts))]

    def start(rt: HybridRuntime) -> None:
        for request_id, prompt, each in zip(ids, prompts, params, strict=True):
            rt.add_request(prompt, each, request_id=request_id)

    options: dict[str, Any] = {
        "num_kv_slots": 44,
        "max_model_len": 40,
        "num_state_slots": 5,
        "max_num_batched_tokens": 8,
    }
    expected: dict[str, Any] = {}
    with runtime_of("kda", **options) as rt:
        start(rt)
        _drive(rt, expected)
        assert rt.stats().scheduler.num_preemptions > 0
        assert rt.stats().cache.num_evicted_states > 0
    count, num_interrupted = 1 + 5 * distance, 0
    with runtime_of("kda", overlap=overlap, **options) as rt:
        reached = True
        while reached:
            rt.reset_prefix_cache()
            start(rt)
            tokens: dict[str, Any] = {}
            # The second interrupt comes while the engine recovers from the first, or soon after.
            with interrupt_at_lines([count, count + distance]) as arm_again:
                reached = False
                while rt.has_unfinished:
                    try:
                        _drive(rt, tokens)
                    except KeyboardInterrupt:
                        num_interrupted += 1
                        reached = True
                        arm_again()
            assert tokens.keys() == expected.keys(), count
            for request_id in ids:
                for ours, theirs in zip(tokens[request_id], expected[request_id], strict=True):
                    assert ours[:2] == theirs[:2], (count, request_id)
                    if theirs[2] is not None:
                        assert [entry.keys() for entry in ours[2]] == [entry.keys() for entry in theirs[2]]
            count += STRIDE
        assert_idle(rt)
    assert num_interrupted > 10


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are aborted; what was computed before is in the cache, what was in flight is not."""
    prompt = random_tokens(np.random.default_rng(32), 30)
    with runtime_of("kda") as rt:
        expected = rt.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)[0].outputs[0].token_ids
        rt.reset_prefix_cache()
        decode, calls = rt.model.decode, iter(range(100))

        def interrupted_decode(inputs: Any, memory: Any) -> Any:
            logits = decode(inputs, memory)
            if next(calls) == 3:
                raise KeyboardInterrupt
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(rt.model, "decode", interrupted_decode)
            with pytest.raises(KeyboardInterrupt):
                rt.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert not rt.step()
        assert not rt.has_unfinished
        again = rt.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)[0]
        assert again.outputs[0].token_ids == expected
        assert (again.num_cached_tokens, again.checkpoint_origin) == (29, "tail")
        assert_idle(rt)


@pytest.mark.parametrize("overlap", [False, True])
def test_generate_interrupted_at_any_line_leaves_nothing_behind(overlap: bool) -> None:
    prompts = [random_tokens(np.random.default_rng(33), length) for length in (30, 12)]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    with runtime_of("kda", max_num_batched_tokens=20, overlap=overlap) as rt:
        expected = [output.outputs[0].token_ids for output in rt.generate(prompts, **options)]
        count, was_interrupted = 1, True
        while was_interrupted:
            was_interrupted = False
            rt.reset_prefix_cache()
            with interrupt_at_lines([count]):
                try:
                    rt.generate(prompts, **options)
                except KeyboardInterrupt:
                    was_interrupted = True
            while rt.has_unfinished:
                assert not rt.step()
            assert [output.outputs[0].token_ids for output in rt.generate(prompts, **options)] == expected
            count += 197
        assert_idle(rt)
    assert count > 10 * 197

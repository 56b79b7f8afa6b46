"""Calls, and interrupts, in the middle of other calls: whatever is not refused must not lose an output or an id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, RequestOutput
from hybrid_runtime.engine.request_group import RequestGroup
from hybrid_runtime.errors import ReentrantCallError
from hybrid_runtime.scheduling.scheduler import Scheduler
from tests.engine.helpers import assert_idle
from tests.engine.loop_helpers import LONG, LONG_PROMPT, PROMPTS, drain, reason_of


def during_the_next_forward(rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Lets `action` run inside the next prefill or decode, once."""
    pending = [action]
    for name in ("prefill", "decode"):
        forward = getattr(rt.model, name)

        def wrapped(inputs: Any, memory: Any, forward: Callable[[Any, Any], Any] = forward) -> Any:
            if pending:
                pending.pop()()
            return forward(inputs, memory)

        monkeypatch.setattr(rt.model, name, wrapped)


def test_an_end_that_comes_while_outputs_are_built_is_delivered_next(
    rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request_id, prompt in zip("ab", PROMPTS, strict=False):
        rt.add_request(prompt, request_id=request_id, **LONG)
    plain = RequestGroup.output

    def output_then_abort(group: RequestGroup) -> RequestOutput:
        output = plain(group)
        if group.request_id == "b":
            rt.abort("b")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(RequestGroup, "output", output_then_abort)
        assert not any(output.finished for output in rt.step())
    delivered = drain(rt)
    assert reason_of(delivered["b"][-1]) == "abort"
    assert reason_of(delivered["a"][-1]) == "length"
    assert_idle(rt)


def test_an_abort_of_an_unknown_id_within_a_step_is_forgotten(
    rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt.add_request(PROMPTS[0], request_id="a", **LONG)

    def abort_and_interrupt() -> None:
        rt.abort("later")
        raise KeyboardInterrupt

    during_the_next_forward(rt, monkeypatch, abort_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        rt.step()
    rt.add_request(PROMPTS[1], request_id="later", **LONG)
    delivered = drain(rt)
    assert [reason_of(delivered[request_id][-1]) for request_id in ("a", "later")] == ["length", "length"]


def test_a_refused_call_is_the_callers_error_not_the_requests(
    rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that lets the refusal out of a forward: nobody's request may end for it."""
    rt.add_request(PROMPTS[0], request_id="a", **LONG)
    during_the_next_forward(rt, monkeypatch, rt.step)
    with pytest.raises(ReentrantCallError, match=r"step\(\) was called from within a step"):
        rt.step()
    assert reason_of(drain(rt)["a"][-1]) == "length"


def test_an_interrupted_add_leaves_its_id_free(rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def add_then_interrupt(scheduler: Scheduler, request: Any) -> None:
        add(scheduler, request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "add", add_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            rt.add_request(PROMPTS[0], request_id="a", **LONG)
    assert not drain(rt)
    rt.add_request(PROMPTS[0], request_id="a", **LONG)
    assert reason_of(drain(rt)["a"][-1]) == "length"
    assert_idle(rt)


def test_an_interrupted_close_can_be_finished(
    make: Callable[..., HybridRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = make()
    stream = rt.stream(LONG_PROMPT, **LONG)
    next(stream)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rt._engine.memory, "free", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rt.close()
    rt.close()
    assert rt._engine.memory.kv_pool.layers == ()
    assert not rt.has_unfinished
    with pytest.raises(RuntimeError, match="closed"):
        rt.step()

"""Interrupts and failures of a forward, and the end of a runtime."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, RequestOutput
from tests.engine.loop_helpers import LONG, LONG_PROMPT, PROMPTS, drain, num_queued, reason_of, token_ids_of

# Interrupts and failures of a forward.


def fail_once(monkeypatch: pytest.MonkeyPatch, rt: HybridRuntime, name: str, error: BaseException, call: int) -> None:
    """Lets the `call`-th call of a method of the model do its work on the pools, and raise instead of returning."""
    method, calls = getattr(rt.model, name), iter(range(1, 10**6))

    def wrapped(*args: Any) -> Any:
        result = method(*args)
        if next(calls) == call:
            raise error
        return result

    monkeypatch.setattr(rt.model, name, wrapped)


@pytest.mark.parametrize(("name", "call"), [("prefill", 1), ("prefill", 3), ("decode", 1), ("decode", 5)])
def test_an_interrupt_ends_a_generate_and_leaves_the_runtime_usable(rt, reference, monkeypatch, name, call):
    fail_once(monkeypatch, rt, name, KeyboardInterrupt(), call)
    with pytest.raises(KeyboardInterrupt):
        rt.generate([*PROMPTS, LONG_PROMPT], **LONG)
    assert num_queued(rt) == 0
    assert rt.stats().kv.in_use == rt.stats().state.in_use == 0
    rt._engine.memory.check([])
    assert [token_ids_of(output) for output in rt.generate(PROMPTS, **LONG)] == reference


def test_nothing_is_left_to_deliver_after_an_interrupted_generate(rt, monkeypatch):
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 2)
    with pytest.raises(KeyboardInterrupt):
        rt.generate(PROMPTS, **LONG)
    assert not rt.has_unfinished
    assert rt.step() == []


def test_an_interrupted_step_goes_on_with_the_next(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 4)
    ids = [rt.add_request(prompt, **LONG) for prompt in PROMPTS]
    delivered: dict[str, RequestOutput] = {}
    num_interrupts = 0
    while rt.has_unfinished:
        try:
            delivered |= {output.request_id: output for output in rt.step()}
        except KeyboardInterrupt:
            num_interrupts += 1
            rt._engine.memory.check(rt._engine.scheduler.running)
    assert num_interrupts == 1
    assert [token_ids_of(delivered[request_id]) for request_id in ids] == reference


def test_requests_that_were_added_before_survive_an_interrupted_generate(rt, reference, monkeypatch):
    added = rt.add_request(PROMPTS[0], **LONG)
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        rt.generate(PROMPTS[1:], **LONG)
    delivered = drain(rt)
    assert set(delivered) == {added}
    assert token_ids_of(delivered[added][-1]) == reference[0]


def test_an_interrupted_stream_is_aborted(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 3)
    stream = rt.stream(PROMPTS[0], **LONG)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert list(stream) == []
    assert num_queued(rt) == 0
    assert token_ids_of(rt.generate(PROMPTS[0], **LONG)[0]) == reference[0]


def test_a_forward_that_raises_once_among_several_costs_nobody_anything(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", RuntimeError("out of luck"), 3)
    assert [token_ids_of(output) for output in rt.generate(PROMPTS, **LONG)] == reference


def test_a_forward_that_raises_over_one_request_ends_it_with_the_message(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", RuntimeError("out of luck"), 4)
    (output,) = rt.generate(PROMPTS[0], **LONG)
    assert (reason_of(output), output.outputs[0].stop_reason) == ("error", "RuntimeError: out of luck")
    assert token_ids_of(output) == reference[0][: len(token_ids_of(output))]
    assert token_ids_of(rt.generate(PROMPTS[0], **LONG)[0]) == reference[0]


# Closing.


def test_a_closed_runtime_does_nothing_any_more(make):
    rt = make()
    queued = rt.stream(PROMPTS[0], **LONG)
    running = rt.stream(PROMPTS[1], **LONG)
    next(running)
    rt.add_request(PROMPTS[2], **LONG)
    rt.close()
    rt.close()
    rt.prefix_cache.check()
    rt._engine.memory.check([])
    assert not rt.has_unfinished
    for call in (
        lambda: rt.generate([5]),
        lambda: rt.stream([5]),
        lambda: rt.add_request([5]),
        lambda: rt.step(),
        lambda: rt.abort("0"),
        lambda: rt.reset_prefix_cache(),
        lambda: next(queued),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert not any(token_ids_of(output) for output in running)  # it ends
    assert rt._engine.memory.kv_pool.layers == rt._engine.memory.state_pool.layers == ()


def test_a_context_manager_closes(make):
    with make() as rt:
        rt.generate(PROMPTS[0], max_tokens=2)
    with pytest.raises(RuntimeError, match="closed"):
        rt.generate([5])


def test_a_context_manager_closes_after_an_error_and_lets_it_through(make):
    rt = make()

    def use() -> None:
        with rt:
            rt.add_request(PROMPTS[0])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    with pytest.raises(RuntimeError, match="closed"):
        rt.step()

"""One thing fails, at every place where it can: an allocation, a forward, a copy to or from the second tier, a user.

Nothing is lost, every slot keeps one owner, whoever is not to blame ends with the right tokens, and who is to blame
says so. All of it on a hash for a model, which sees every slot that is read.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import hybrid_runtime.scheduling.scheduler as scheduler_module
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.scheduling.placement import ORIGINS, CheckpointPolicy
from hybrid_runtime.scheduling.request import Request
from tests.engine.failing_calls import Counter, allocations, failing_calls
from tests.engine.hashing_engine import HashingEngine
from tests.engine.hashing_launchers import OverlapKind

REQUESTS = ("leader", "follower", "samples", "hinted", "warm-up", "urgent", "again", "next turn")
HEAD = [0, 1, 2, 2, 1, 0, 0, 1, 2, 1]
Step = Callable[[], None]
overlaps = pytest.mark.parametrize("overlap", [None, "late"], ids=["alone", "overlap"])


def build(overlap: OverlapKind | None = None) -> HashingEngine:
    """Pools that are too small for the workload, every kind of checkpoint, and a second tier that is small, too."""
    policy = CheckpointPolicy(min_saving=2, checkpoint_interval=6, track_interval=3, num_track_slots=2)
    return HashingEngine(
        num_kv=26, num_states=7, max_len=26, num_seqs=3, budget=7, host=(60, 4), policy=policy, overlap=overlap
    )


def drive(engine: HashingEngine, step: Step) -> None:
    """Requests that share beginnings at once and later, samples, hints, priorities, a warm-up, a next turn."""
    engine.add("leader", [*HEAD, 0, 0, 1], 8)
    engine.add("follower", [*HEAD, 2, 1, 1, 1], 7)
    engine.add("samples", [2, 2, 0], 6, num_samples=2)
    for _ in range(3):
        step()
    engine.add("hinted", [1, 1, 0, 2, 0, 2], 9, hints=(2, 4), priority=1)
    engine.add("warm-up", [1, 0, 1, 0, 2, 2, 2, 1], 1, is_warmup=True)
    for _ in range(14):
        step()
    engine.add("urgent", [*HEAD[:6], 1, 1, 0, 0], 6, priority=-1)
    engine.add("again", [*HEAD, 0, 0, 1], 8)
    engine.add("next turn", [1, 0, 1, 0, 2, 2, 2, 1, 0, 2], 9)
    engine.add("stopped", [2, 2, 0], 9, stops=(0,))
    for _ in range(500):
        if not engine.engine.has_unfinished:
            return
        step()
    raise AssertionError("the engine does not come to an end")


def run_with_failing_calls(owner: type, name: str, counter: Counter, overlap: OverlapKind | None) -> HashingEngine:
    """Until the failure, all is as in a run without one, which is checked elsewhere: checks start there."""
    engine = build(overlap)
    with failing_calls(owner, name, counter, PoolExhausted("planted")):
        drive(engine, lambda: engine.step(check=counter.has_failed))
    return engine


def ended(engine: HashingEngine, reason: str) -> dict[str, list[str]]:
    """The requests of which samples ended for a reason, with the messages."""
    messages = {
        request_id: [str(s.stop_reason) for s in engine.samples(request_id) if s.finish_reason == reason]
        for request_id in engine.groups
    }
    return {request_id: each for request_id, each in messages.items() if each}


def assert_all_right(engine: HashingEngine, **may_end: str) -> None:
    """All ended with all tokens; requests that may have ended otherwise (name=reason), with the first ones."""
    for request_id in engine.groups:
        engine.assert_tokens(request_id, may_end=may_end.get(request_id))
    engine.assert_all_ended()


@overlaps
def test_the_workload_reaches_every_place(monkeypatch: pytest.MonkeyPatch, overlap: OverlapKind | None) -> None:
    """Else what follows would prove little."""
    followed: list[int] = []
    find_leader = scheduler_module.find_leader

    def noting(*args: Any, **options: Any) -> Any:
        following = find_leader(*args, **options)
        followed.extend([] if following is None else [following.length])
        return following

    monkeypatch.setattr(scheduler_module, "find_leader", noting)
    engine = build(overlap)
    drive(engine, engine.step)
    assert_all_right(engine)
    assert engine.scheduler.num_preemptions >= 2
    assert (engine.engine.num_wasted_rows > 0) == (overlap is not None)
    assert len(followed) >= 2
    assert engine.residency.num_kept_checkpoints.keys() == set(ORIGINS)
    assert min(engine.memory.supply.num_evicted_tokens, engine.memory.supply.num_evicted_states) > 20
    assert engine.tier is not None
    assert engine.tier.counts.num_saved_checkpoints > 20
    assert engine.tier.counts.num_restored_checkpoints >= (3 if overlap is None else 1)


@allocations
@overlaps
def test_an_allocation_that_fails_once_costs_nobody_a_token(
    owner: type, name: str, overlap: OverlapKind | None
) -> None:
    """At every call of the workload. No exception gets out: who asked waits, or does without a checkpoint or a copy."""
    calls = Counter()
    run_with_failing_calls(owner, name, calls, overlap)
    assert calls.num_calls > 10
    stride = 2 if owner is SlotAllocator else 1  # these calls come from the others, behind an eviction
    for failing in range(1, calls.num_calls + 1, stride):
        assert_all_right(run_with_failing_calls(owner, name, Counter(failing), overlap))


@allocations
@overlaps
def test_pools_that_give_nothing_any_more_end_requests_with_an_error(
    owner: type, name: str, overlap: OverlapKind | None
) -> None:
    """From some call on all fail: everybody ends, each with the first of the right tokens and a message."""
    calls = Counter()
    run_with_failing_calls(owner, name, calls, overlap)
    for failing in range(1, calls.num_calls + 1, 4):
        engine = run_with_failing_calls(owner, name, Counter(failing, lasts=True), overlap)
        failed = ended(engine, "error")
        assert all("no room for" in message for messages in failed.values() for message in messages)
        assert_all_right(engine, **dict.fromkeys(failed, "error"))
        assert len(failed) == len(engine.groups) or failing > 1


@overlaps
def test_a_forward_that_fails_once_costs_only_who_was_alone_in_it(overlap: OverlapKind | None) -> None:
    """At every forward of the workload, which leaves states and KV half written."""
    calls = Counter()
    num_failed = 0
    while calls.failing is None or calls.has_failed:
        calls = Counter((calls.failing or 0) + 1)
        engine, in_forward = build(overlap), set[str]()

        def fail(requests: Sequence[Request], calls: Counter = calls, in_forward: set[str] = in_forward) -> None:
            if calls.fails_now():
                in_forward.update(request.request_id for request in requests)
                raise RuntimeError("planted")

        engine.runner.before_forward = fail
        drive(engine, engine.step)
        failed = ended(engine, "error")
        assert all(messages == ["RuntimeError: planted"] for messages in failed.values())
        assert not failed or failed.keys() == in_forward
        assert_all_right(engine, **dict.fromkeys(failed, "error"))
        num_failed += len(failed)
    assert num_failed > 0


@pytest.mark.parametrize("num_sampled", [0, 1, 4])
@overlaps
def test_a_request_whose_forwards_fail_ends_with_the_error_and_no_other(
    num_sampled: int, overlap: OverlapKind | None
) -> None:
    """From its first forward on, or from when it has some tokens."""
    for culprit in REQUESTS:
        if culprit == "warm-up" and num_sampled:
            continue  # it never gets there
        engine = build(overlap)

        def fail(requests: Sequence[Request], culprit: str = culprit) -> None:
            if any(each.request_id == culprit and len(each.tokens.output) >= num_sampled for each in requests):
                raise RuntimeError("planted")

        engine.runner.before_forward = fail
        drive(engine, engine.step)
        samples = engine.samples(culprit)
        assert ended(engine, "error") == {culprit: ["RuntimeError: planted"] * len(samples)}
        assert all(len(sample.token_ids) == num_sampled for sample in samples)
        assert_all_right(engine, **{culprit: "error"})


@overlaps
def test_an_abort_between_any_two_steps_costs_the_others_nothing(overlap: OverlapKind | None) -> None:
    """Of each request, before each step."""
    boundaries: list[tuple[int, str]] = []
    engine = build(overlap)
    num_steps = 0

    def note() -> None:
        nonlocal num_steps
        boundaries.extend((num_steps, request_id) for request_id in engine.engine.groups)
        engine.step()
        num_steps += 1

    drive(engine, note)
    assert len(boundaries) > 100
    for boundary, request_id in boundaries:
        engine = build(overlap)
        num_steps = 0

        def step(engine: HashingEngine = engine, boundary: int = boundary, request_id: str = request_id) -> None:
            nonlocal num_steps
            if num_steps == boundary:
                engine.engine.abort(request_id)
                engine.check()
            engine.step(check=num_steps >= boundary)
            num_steps += 1

        drive(engine, step)
        # Where steps overlap an abort waits for the one in flight, which may bring the end.
        assert ended(engine, "abort").keys() == {request_id} or (overlap and not ended(engine, "abort"))
        assert_all_right(engine, **{request_id: "abort"})


@pytest.mark.parametrize("direction", ["save", "restore"])
@pytest.mark.parametrize("lasts", [False, True])
@overlaps
def test_a_full_or_broken_disk_costs_only_hits(direction: str, lasts: bool, overlap: OverlapKind | None) -> None:
    """At every copy to the second tier or from it, in the middle of which it fails."""
    failing, counter = 0, Counter()
    while counter.failing is None or counter.has_failed:
        failing += 1
        counter = Counter(failing, lasts=lasts)
        engine = build(overlap)
        assert engine.tier is not None
        assert engine.store is not None

        def fail(actual: str, counter: Counter = counter) -> None:
            if actual == direction and counter.fails_now():
                raise OSError(errno.ENOSPC, "planted")

        engine.store.before_copy = fail
        drive(engine, engine.step)
        if counter.has_failed:
            assert engine.tier.counts.num_failures == (counter.num_calls - failing + 1 if lasts else 1)
        assert_all_right(engine)
    assert failing > (3 if overlap is None else 1)

"""Which requests a step holds, and what admission and preemption do to the pools. No model: steps are marked as run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.request import PrefixHit, Request, RequestStatus, TokenBuffer
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.scheduling.scheduler import ScheduledStep, Scheduler
from hybrid_runtime.scheduling.supply import SlotSupply

MAX_LEN = 200


def make_scheduler(*, kv: int = 1000, states: int = 20, seqs: int = 8, budget: int = 32) -> Scheduler:
    supply = SlotSupply(SlotAllocator(kv), SlotAllocator(states), RadixCache())
    residency = Residency(supply, RequestTable(seqs, MAX_LEN), enabled=True)
    return Scheduler(residency, max_num_seqs=seqs, max_num_batched_tokens=budget)


@pytest.fixture
def arrivals() -> Iterator[int]:
    return itertools.count()


def new_request(arrivals: Iterator[int], length: int, *, first: int = 0, priority: int = 0) -> Request:
    """A prompt of its own: tokens count up from `first`."""
    arrival = next(arrivals)
    tokens = np.arange(first, first + length, dtype=np.int32)
    return Request(str(arrival), 0, SamplingParams(), TokenBuffer(tokens, MAX_LEN), priority, arrival, seed=0)


def run(scheduler: Scheduler, step: ScheduledStep) -> None:
    """What the engine does after the forwards, with a fixed token for a sampler."""
    scheduler.note_launch(step)
    for work in step.works:
        work.request.num_landed_tokens = work.stop
    for chunk in step.prefill:
        if chunk.checkpoints:
            scheduler.residency.keep_checkpoints(chunk.request, chunk.checkpoints)
        if chunk.is_last:
            chunk.request.tokens.append(7)
    for row in step.decode:
        row.request.tokens.append(7)


def decoding(step: ScheduledStep) -> list[Request]:
    return [row.request for row in step.decode]


def counters(scheduler: Scheduler) -> tuple[int, ...]:
    supply = scheduler.residency.supply
    cache = supply.cache
    return (
        supply.kv.num_free,
        supply.states.num_free,
        cache.num_nodes,
        cache.num_evictable_kv,
        cache.num_evictable_states,
        scheduler.residency.table.num_free_rows,
    )


def test_prefill_keeps_to_its_budget_and_decode_rows_go_on(arrivals: Iterator[int]) -> None:
    scheduler = make_scheduler(budget=32)
    short = new_request(arrivals, 5, first=1000)
    scheduler.add(short)
    run(scheduler, scheduler.schedule())
    long = new_request(arrivals, 150)
    scheduler.add(long)
    num_steps = 0
    while long.num_uncomputed_tokens > 1 or long.num_computed_tokens < 150:
        step = scheduler.schedule()
        assert short in decoding(step), "a long prompt must not hold up a row that decodes"
        assert sum(chunk.stop - chunk.start for chunk in step.prefill) <= 32
        run(scheduler, step)
        num_steps += 1
    assert num_steps == 5  # ceil(150 / 32)


def test_a_long_prompt_does_not_starve_a_short_one(arrivals: Iterator[int]) -> None:
    scheduler = make_scheduler(budget=32)
    long, short = new_request(arrivals, 180), new_request(arrivals, 10, first=1000)
    scheduler.add(long)
    run(scheduler, scheduler.schedule())
    scheduler.add(short)
    step = scheduler.schedule()
    assert {chunk.request: chunk.stop - chunk.start for chunk in step.prefill} == {long: 22, short: 10}


def test_admission_that_does_not_fit_changes_nothing(arrivals: Iterator[int]) -> None:
    """Whichever pool it fails in, and although it matched and locked a prefix first."""
    for kv, states in ((100, 20), (1000, 3)):
        scheduler = make_scheduler(kv=kv, states=states)
        resident = [new_request(arrivals, 20), new_request(arrivals, 20, first=500)]
        for request in resident:
            scheduler.add(request)
            run(scheduler, scheduler.schedule())
        scheduler.residency.supply.states.allocate(scheduler.residency.supply.states.num_free)  # none left
        scheduler.residency.supply.release(scheduler.residency.cache.evict_state(states))
        scheduler.residency.supply.states.allocate(scheduler.residency.supply.states.num_free)
        before = counters(scheduler)
        large = new_request(arrivals, 90)
        assert scheduler.residency.admit(large, headroom=0) is None
        assert counters(scheduler) == before
        assert (large.status, large.residence, large.num_computed_tokens) == (RequestStatus.WAITING, None, 0)
        scheduler.residency.cache.check()


def test_the_queue_is_strict(arrivals: Iterator[int]) -> None:
    """A small request does not overtake a large one that has to wait for room; priority does."""
    scheduler = make_scheduler(kv=120)
    scheduler.add(new_request(arrivals, 60))
    run(scheduler, scheduler.schedule())
    large, small, urgent = (
        new_request(arrivals, 100, first=300),
        new_request(arrivals, 3, first=600),
        new_request(arrivals, 3, first=900, priority=-1),
    )
    for request in (large, small, urgent):
        scheduler.add(request)
    step = scheduler.schedule()
    assert [admission.request for admission in step.admissions] == [urgent]
    assert list(scheduler.waiting) == [large, small]


def test_the_lowest_priority_and_then_the_youngest_gives_up(arrivals: Iterator[int]) -> None:
    scheduler = make_scheduler(kv=210, states=20)
    requests = [
        new_request(arrivals, 30, first=0, priority=1),
        new_request(arrivals, 30, first=300),
        new_request(arrivals, 30, first=600, priority=1),
        new_request(arrivals, 30, first=900),
    ]
    for request in requests:
        scheduler.add(request)
    order: list[Request] = []
    while len(order) < 3:
        run(scheduler, scheduler.schedule())
        order += [request for request in requests if request.num_preemptions and request not in order]
    assert order == [requests[2], requests[0], requests[3]]
    assert requests[1].status is RequestStatus.RUNNING, "the last one running never gives up"


def test_a_preempted_request_resumes_where_it_was(arrivals: Iterator[int]) -> None:
    scheduler = make_scheduler()
    request = new_request(arrivals, 30)
    scheduler.add(request)
    for _ in range(5):
        run(scheduler, scheduler.schedule())
    computed = request.num_computed_tokens
    scheduler.preempt(request)
    assert (request.num_computed_tokens, request.residence) == (0, None)
    step = scheduler.schedule()
    assert request.num_computed_tokens == computed
    assert decoding(step) == [request], "nothing is computed twice while the donated state survives"


def test_a_state_slot_that_cannot_be_had_skips_the_checkpoint(arrivals: Iterator[int]) -> None:
    scheduler = make_scheduler(states=1)
    request = new_request(arrivals, 30)
    scheduler.add(request)
    step = scheduler.schedule()
    assert step.prefill[0].checkpoints == ()
    assert scheduler.residency.num_skipped_checkpoints == {"tail": 1}


def test_a_fresh_start_forgets_who_was_suspected(arrivals: Iterator[int]) -> None:
    """Else a later failure of others would leave a request that neither runs alone nor among others."""
    scheduler = make_scheduler()
    requests = [new_request(arrivals, 10, first=100 * place) for place in range(3)]
    for request in requests[:2]:
        scheduler.add(request)
    step = scheduler.schedule()
    scheduler.suspect(step)
    scheduler.reset(step)
    assert all(request.runs_alone for request in requests[:2])
    scheduler.residency.supply.start_over()
    scheduler.residency.table.start_over()
    scheduler.start_over()
    for request in requests:
        request.start_over(0)
        scheduler.add(request)
    assert not any(request.runs_alone for request in requests)
    assert len(scheduler.schedule().requests) == 3


def test_a_request_that_waits_for_room_uses_nothing(arrivals: Iterator[int]) -> None:
    """However often its admission is tried: neither the recency nor the hits of what it would match change."""
    scheduler = make_scheduler(kv=120)
    shared = new_request(arrivals, 60)
    scheduler.add(shared)
    run(scheduler, scheduler.schedule())
    scheduler.add(new_request(arrivals, 55, first=1000))
    run(scheduler, scheduler.schedule())
    scheduler.finish(shared)
    run(scheduler, scheduler.schedule())
    scheduler.add(new_request(arrivals, 80))
    before = {node: (node.num_hits, node.last_used) for node in scheduler.residency.cache.nodes()}
    assert before
    for _ in range(3):
        assert not scheduler.schedule().admissions
    assert {node: (node.num_hits, node.last_used) for node in scheduler.residency.cache.nodes()} == before


def test_a_match_that_must_be_evicted_for_the_request_is_no_room(arrivals: Iterator[int]) -> None:
    scheduler = make_scheduler(kv=100, states=1)
    scheduler.residency.cache.insert(
        np.arange(30, dtype=np.int32),
        scheduler.residency.supply.take_kv(30),
        [Checkpoint(30, StateSlot(int(scheduler.residency.supply.take_states(1)[0])), "final")],
    )
    request = new_request(arrivals, 40)
    scheduler.add(request)
    [admission] = scheduler.schedule().admissions
    assert admission.copied_from is None
    assert request.prefix_hit == PrefixHit(0, 30, None, "no_room")

"""Order of admission: priority, then arrival, also after a preemption."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.request import Request, TokenBuffer
from hybrid_runtime.scheduling.waiting_queue import WaitingQueue


def request(arrival: int, priority: int = 0) -> Request:
    tokens = TokenBuffer(np.array([1, 2], dtype=np.int32), 4)
    return Request(f"r{arrival}", 0, SamplingParams(), tokens, priority, arrival, seed=0)


def queue_of(requests: list[Request]) -> WaitingQueue:
    queue = WaitingQueue()
    for each in requests:
        queue.add(each)
    return queue


def test_an_empty_queue():
    queue = WaitingQueue()
    assert len(queue) == 0
    assert list(queue) == []


def test_earlier_arrivals_come_first_and_lower_priority_values_before_them():
    first, second, urgent, idle = request(0), request(1), request(2, priority=-1), request(3, priority=7)
    assert list(queue_of([idle, second, urgent, first])) == [urgent, first, second, idle]


def test_a_preempted_request_returns_to_its_old_place():
    first, second, third = request(0), request(1), request(2)
    queue = queue_of([first, second, third])
    queue.remove(second)
    assert list(queue) == [first, third]
    queue.add(second)
    assert list(queue) == [first, second, third]


def test_a_request_that_does_not_wait_cannot_be_removed():
    first, second = request(0), request(1)
    queue = queue_of([first])
    with pytest.raises(ValueError, match="r1 is not waiting"):
        queue.remove(second)
    with pytest.raises(ValueError, match="r0 is not waiting"):
        queue.remove(request(0))  # another request of the same order
    assert list(queue) == [first]
    queue.remove(first)
    with pytest.raises(ValueError, match="r0 is not waiting"):
        queue.remove(first)


def test_requests_may_be_removed_and_added_while_iterating():
    requests = [request(i) for i in range(4)]
    queue = queue_of(requests)
    seen = []
    for each in queue:
        seen.append(each)
        queue.remove(each)
        queue.add(request(10 + each.arrival))
    assert seen == requests
    assert len(queue) == 4


@given(
    st.lists(st.integers(-2, 2), max_size=12).map(
        lambda priorities: [request(arrival, priority) for arrival, priority in enumerate(priorities)]
    ),
    st.data(),
)
def test_the_order_is_that_of_a_sorted_list_whatever_comes_and_goes(requests, data):
    queue = WaitingQueue()
    waiting: list[Request] = []
    for _ in range(3 * len(requests)):
        each = data.draw(st.sampled_from(requests))
        if each in waiting:
            queue.remove(each)
            waiting.remove(each)
        else:
            queue.add(each)
            waiting.append(each)
        assert list(queue) == sorted(waiting, key=lambda r: (r.priority, r.arrival))
        assert len(queue) == len(waiting)

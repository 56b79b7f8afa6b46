"""The requests that wait for admission, in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from hybrid_runtime.scheduling.request import Request

ORDER = attrgetter("order")


class WaitingQueue:
    """Sorted by priority, then arrival; a preempted request returns to its old place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Over a snapshot: requests may be removed meanwhile."""
        return iter(list(self._requests))

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=ORDER)

    def remove(self, request: Request) -> None:
        """Raises ValueError if the request does not wait here."""
        place = bisect_left(self._requests, request.order, key=ORDER)
        if place == len(self._requests) or self._requests[place] is not request:
            raise ValueError(f"request {request.request_id} is not waiting")
        del self._requests[place]

"""Calls of real methods that raise: the n-th, or all from the n-th on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.scheduling.supply import SlotSupply

ALLOCATIONS = [
    (SlotSupply, "take_kv"),
    (SlotSupply, "take_states"),
    (SlotAllocator, "allocate"),
    (RequestTable, "allocate_row"),
]
allocations = pytest.mark.parametrize(("owner", "name"), ALLOCATIONS, ids=[f"{o.__name__}.{n}" for o, n in ALLOCATIONS])


class Counter:
    """Counts calls, and says at which to fail: the `failing`-th, and if it `lasts` at all that follow."""

    def __init__(self, failing: int | None = None, *, lasts: bool = False) -> None:
        self.failing = failing
        self.lasts = lasts
        self.num_calls = 0

    @property
    def has_failed(self) -> bool:
        return self.failing is not None and self.num_calls >= self.failing

    def fails_now(self) -> bool:
        self.num_calls += 1
        return self.num_calls == self.failing or (self.lasts and self.has_failed)


@contextmanager
def failing_calls(owner: type, name: str, counter: Counter, error: Exception) -> Iterator[None]:
    """`owner.name` raises `error` when `counter` says so."""
    real = getattr(owner, name)

    def call(self: object, *args: Any) -> Any:
        if counter.fails_now():
            raise error
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield

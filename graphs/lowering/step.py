"""A step to examine: a function, the fake tensors it is called with, and which of them are pools."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PoolArgument:
    """A tensor that a step indexes by slot and must never copy.

    The number of slots (the null slot included, on `slot_axis`) is a prime: what is as large as the pool, or as a part
    of each slot, then shows by its size being a multiple, whatever its shape and dtype, and nothing else does.

    `rows_touched`: how many slots one call reads (and, if it writes the pool, writes). It stands in for what can't be
    seen of a hand-written kernel, which is given the whole pool. `is_aligned`: whoever made the pool sees to it that
    its address is a multiple of 16, so that code which would copy any other never does.

    Raises ValueError for a number of slots that is not a prime of at least 257.
    """

    name: str
    tensor: Tensor
    rows_touched: int
    slot_axis: int = 0
    is_aligned: bool = False

    def __post_init__(self) -> None:
        slots = self.num_slots
        if slots < 257 or any(slots % divisor == 0 for divisor in range(2, math.isqrt(slots) + 1)):
            raise ValueError(f"pool {self.name} has {slots} slots, which is not a prime of at least 257")

    @property
    def num_slots(self) -> int:
        return self.tensor.shape[self.slot_axis]

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def bytes_touched(self) -> int:
        return self.rows_touched * (self.num_bytes // self.num_slots)


@dataclass(frozen=True, eq=False)
class Trial:
    """A small real instance of a step on the CPU, to run on different data.

    `static` are the tensors that a captured graph would hold the addresses of; each of `fills` overwrites them in place
    with other values. `function` takes no argument and reads them.
    """

    function: Callable[[], Any]
    static: Sequence[Tensor]
    fills: Sequence[Callable[[], None]]


@dataclass(frozen=True, eq=False)
class Step:
    """`function(*arguments)` on fake CUDA tensors, made under one `FakeTensorMode`.

    `is_captured`: whether it is meant to be captured as a CUDA graph, hence must be safe to capture. `options` are
    Inductor's, over its defaults.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    pools: tuple[PoolArgument, ...] = ()
    is_captured: bool = True
    trial: Trial | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in order, inside of dataclasses too."""
        return tuple(_tensors(self.arguments))

    def is_pool_sized(self, num_bytes: int) -> bool:
        """Whether so many bytes are something of every slot of a pool."""
        return num_bytes > 0 and any(num_bytes % pool.num_slots == 0 for pool in self.pools)

    def pool_like(self, shape: Sequence[int], dtype: torch.dtype) -> PoolArgument | None:
        """The pool with this shape and dtype: how a pool is known again inside a region, where it has another name."""
        for pool in self.pools:
            if tuple(pool.tensor.shape) == tuple(shape) and pool.tensor.dtype == dtype:
                return pool
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])

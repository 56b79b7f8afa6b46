"""Free list of one pool. Knows indices only; the tensors they index are the pool's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.slots import SlotArray


class SlotAllocator:
    """Hands out slots `1..num_slots`, last released first; slot 0 is the null slot and never leaves.

    A stack of free slots beside a bitmap of the same fact: a call costs O(slots in the call), whatever the pool's size.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {num_slots}")
        self.num_slots = num_slots
        self._stack: SlotArray = np.arange(num_slots, 0, -1, dtype=np.int32)
        self._num_free = num_slots
        self._is_free: NDArray[np.bool_] = np.ones(num_slots + 1, dtype=np.bool_)
        self._is_free[0] = False
        # Written at the slots of one release to find repetitions in it without sorting; its contents are never kept.
        self._writer: SlotArray = np.zeros(num_slots + 1, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    def is_free(self, slot: int) -> bool:
        self._require_in_range(np.asarray([slot], dtype=np.int64))
        return bool(self._is_free[slot])

    def free_slots(self) -> SlotArray:
        """A copy of the free slots, in no particular order. O(number of free slots)."""
        return self._stack[: self._num_free].copy()

    def allocate(self, n: int) -> SlotArray:
        """Takes `n` free slots, int32 `[n]`; the caller owns them until it releases them.

        Raises `PoolExhausted`, and takes nothing, if fewer than `n` are free; `ValueError` if `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        if n > self._num_free:
            raise PoolExhausted(f"asked for {n} slots, {self._num_free} of {self.num_slots} are free")
        remaining = self._num_free - n
        slots = self._stack[remaining : self._num_free][::-1].copy()
        self._num_free = remaining
        self._is_free[slots] = False
        return slots

    def release(self, slots: NDArray[np.integer] | Iterable[int]) -> None:
        """Gives slots back. Raises `ValueError`, and changes nothing, if one is 0, out of range, repeated or free."""
        array = slots if isinstance(slots, np.ndarray) else np.array(list(slots), dtype=np.int64)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"slots must be a list of integers, got {array.dtype} of shape {array.shape}")
        self._require_in_range(array)
        already_free = self._is_free[array]
        if already_free.any():
            raise ValueError(f"slots released twice: {array[already_free].tolist()}")
        order = np.arange(len(array), dtype=np.int32)
        self._writer[array] = order
        repeated = self._writer[array] != order
        if repeated.any():
            raise ValueError(f"slots released twice in one call: {array[repeated].tolist()}")
        self._stack[self._num_free : self._num_free + len(array)] = array
        self._num_free += len(array)
        self._is_free[array] = True

    def _require_in_range(self, slots: NDArray[np.integer]) -> None:
        outside = (slots < 1) | (slots > self.num_slots)
        if outside.any():
            raise ValueError(f"slots outside 1..{self.num_slots}: {slots[outside].tolist()}")

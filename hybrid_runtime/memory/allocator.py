"""Free list of one pool. Knows indices only; the tensors they index are the pool's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.slots import SlotArray

_TAKEN = np.int32(-1)
_TAKEN_BYTES = _TAKEN.tobytes()


class SlotAllocator:
    """Hands out slots `1..num_slots`, last released first; slot 0 is the null slot and never leaves.

    A stack of free slots beside the place of each in it: a call costs O(slots in the call), whatever the pool's size,
    in a dozen calls of NumPy. Arrays are tested for one value by their bytes, which is several times faster than a
    reduction.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {num_slots}")
        self.num_slots = num_slots
        self._num_free = num_slots
        self._stack: SlotArray = np.arange(num_slots, 0, -1, dtype=np.int32)
        # By slot: its index in the stack, or _TAKEN. The null slot has a place, so that it can't be released.
        self._places: NDArray[np.int32] = np.arange(num_slots, -1, -1, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    def is_free(self, slot: int) -> bool:
        if not 1 <= slot <= self.num_slots:
            raise ValueError(f"slot {slot} outside 1..{self.num_slots}")
        return bool(self._places[slot] != _TAKEN)

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
        self._places[slots.astype(np.intp)] = _TAKEN
        return slots

    def release(self, slots: NDArray[np.integer] | Iterable[int]) -> None:
        """Gives slots back. Raises `ValueError`, and changes nothing, if one is 0, out of range, repeated or free."""
        array = slots if isinstance(slots, np.ndarray) else np.array(list(slots), dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"slots must be a list of integers, got {array.dtype} of shape {array.shape}")
        count = len(array)
        if count == 0:
            return
        indices = array.astype(np.intp)
        # Read as unsigned, what is negative is too large.
        if indices.view(np.uintp).max() > self.num_slots:
            raise ValueError(f"slots outside 1..{self.num_slots}: {array.tolist()}")
        if self._places.take(indices).tobytes() != _TAKEN_BYTES * count:
            free = indices[self._places[indices] != _TAKEN]
            raise ValueError(f"slots released twice, or the null slot: {free.tolist()}")
        places = np.arange(self._num_free, self._num_free + count, dtype=np.int32)
        self._places[indices] = places
        # Of a slot that occurs several times only the last place was kept.
        if self._places.take(indices).tobytes() != places.tobytes():
            repeated = indices[self._places[indices] != places]
            self._places[indices] = _TAKEN
            raise ValueError(f"slots released twice in one call: {repeated.tolist()}")
        self._stack[self._num_free : self._num_free + count] = array
        self._num_free += count

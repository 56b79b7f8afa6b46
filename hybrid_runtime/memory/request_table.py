"""The table that maps each position of each running request to its KV slot. No torch: the engine mirrors it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.errors import PoolExhausted


@dataclass(frozen=True)
class TableEntries:
    """New entries for the device's copy of the table: `slots[i]` belongs at `places[i]` of its rows laid end to end.

    An entry may occur more than once, with the same slot.
    """

    places: NDArray[np.int64]
    slots: NDArray[np.int32]


class RequestTable:
    """Host copy of `req_to_token`, int32 `[max_num_seqs + 1, max_model_len]`. Row 0 is for padding and holds slot 0.

    Entries behind a request's last slot are stale; readers go by lengths.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.slots: NDArray[np.int32] = np.zeros((max_num_seqs + 1, max_model_len), dtype=np.int32)
        self._writes: list[NDArray[np.int64]] = []  # places
        self.start_over()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate_row(self) -> int:
        """A row of its own for a request. Raises PoolExhausted when all are taken."""
        if not self._free_rows:
            raise PoolExhausted(f"all {len(self.slots) - 1} rows of the request table are taken")
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        if not 0 < row < len(self.slots) or row in self._free_rows:
            raise ValueError(f"row {row} is not allocated")
        self._free_rows.append(row)

    def write(self, row: int, start: int, slots: NDArray[np.int32]) -> None:
        """Sets the KV slots of positions `start, start + 1, ...` of the request in `row`."""
        if len(slots):
            self.slots[row, start : start + len(slots)] = slots
            first = row * self.slots.shape[1] + start
            self._writes.append(np.arange(first, first + len(slots)))

    def write_each(self, rows: Sequence[int], positions: Sequence[int], slots: NDArray[np.int32]) -> None:
        """Sets one KV slot of each of some requests."""
        row_array, position_array = np.array(rows), np.array(positions)
        self.slots[row_array, position_array] = slots
        self._writes.append(row_array * self.slots.shape[1] + position_array)

    def start_over(self) -> None:
        """Declares all rows free, whoever had them."""
        self._free_rows = list(range(len(self.slots) - 1, 0, -1))  # the lowest is handed out first

    def take_writes(self) -> TableEntries | None:
        """A copy of what was written since the last call; None: nothing."""
        writes, self._writes = self._writes, []
        if not writes:
            return None
        places = np.concatenate(writes)
        return TableEntries(places, self.slots.reshape(-1)[places])

    def forget_writes(self) -> None:
        """For a device that reads this very table."""
        self._writes.clear()

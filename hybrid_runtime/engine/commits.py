"""What becomes of accepted paths: at once, or, where states lag behind, before they are read next.

Shapes: B rows, L nodes of the longest path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from hybrid_runtime.engine.batches import Indices, to_device
from hybrid_runtime.engine.ranges import Range
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.ops.draft_tree import AcceptedPath

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """The accepted nodes of one row, and the slot, if any, for the state behind the first `num_tracked` of them."""

    request_row: int
    working_slot: int
    nodes: Indices  # none: the row goes along for its place in the batch
    track_slot: int = 0
    num_tracked: int = 0


class Commits:
    """Writes states behind accepted paths by `run`. With `is_lazy` these wait for `catch_up`.

    The rows of a batch are those of the verify before, in its order.
    """

    def __init__(self, run: Callable[[CommitInputs], None], device: torch.device, *, is_lazy: bool) -> None:
        self._run = run
        self._device = device
        self._is_lazy = is_lazy
        self._pending: dict[int, Commit] = {}  # by rows of the request table
        self.num_failures = 0
        self._lost: set[int] = set()  # rows whose states may be half written: that was begun and has not ended

    def add(self, commits: Sequence[Commit]) -> None:
        """Takes the batch of one verify. None of its rows is pending.

        The tokens that were accepted are right even where the states behind them cannot be written: then these rows are
        lost.
        """
        if not self._is_lazy:
            with suppress(Exception):  # the model's
                self._write(commits)
            return
        for commit in commits:
            if len(commit.nodes):
                assert commit.request_row not in self._pending
                self._pending[commit.request_row] = commit

    def catch_up(self) -> None:
        """Writes what is pending. Whoever schedules does so before a step reads states, and whoever gives one away.

        What the steps raise gets out; the rows that were pending are lost then.
        """
        if self._pending:
            pending, self._pending = list(self._pending.values()), {}
            self._write(pending)

    def num_pending(self, row: int) -> int:
        """How many tokens the states of this row of the request table lag behind."""
        commit = self._pending.get(row)
        return 0 if commit is None else len(commit.nodes)

    def is_lost(self, row: int) -> bool:
        """Whether the states of this row are not what they should be, since writing them failed."""
        return row in self._lost

    def forget(self, row: int) -> None:
        """Nobody will read the states of this row of the request table."""
        self._pending.pop(row, None)
        self._lost.discard(row)

    def forget_all(self) -> None:
        self._pending = {}
        self._lost = set()

    def _write(self, commits: Sequence[Commit]) -> None:
        rows = {commit.request_row for commit in commits if len(commit.nodes)}
        self._lost |= rows
        try:
            self._run_all(commits)
        except Exception as error:  # the model's
            self.num_failures += 1
            if self.num_failures == 1:
                _LOGGER.error("states behind accepted drafts could not be written, now or again later", exc_info=error)
            raise
        self._lost -= rows

    def _run_all(self, commits: Sequence[Commit]) -> None:
        with Range("commit"):
            if any(commit.track_slot for commit in commits):
                tracked = [commit.nodes[: commit.num_tracked] for commit in commits]
                self._run(self._inputs(commits, [commit.track_slot for commit in commits], tracked))
            working_slots = [commit.working_slot for commit in commits]
            self._run(self._inputs(commits, working_slots, [commit.nodes for commit in commits]))

    def _inputs(self, commits: Sequence[Commit], destinations: Sequence[int], paths: Sequence[Indices]) -> CommitInputs:
        nodes_BL = np.zeros((len(paths), max(1, *map(len, paths))), dtype=np.int64)
        for place, path in enumerate(paths):
            nodes_BL[place, : len(path)] = path
        return CommitInputs(
            request_rows_B=self._indices([commit.request_row for commit in commits]),
            working_slots_B=self._indices([commit.working_slot for commit in commits]),
            destinations_B=self._indices(destinations),
            path=AcceptedPath(to_device(nodes_BL, self._device), self._indices([len(path) for path in paths])),
        )

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)

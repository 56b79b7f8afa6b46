"""Runs commits over static tensors: as CUDA graphs, one per number of rows, or by plain calls.

Shapes: B rows of a bucket, n rows of a commit, L nodes of the longest path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_runtime.graphs.static_arrays import Shapes, StaticArrays
from hybrid_runtime.graphs.step_graphs import StepGraphs
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.ops.draft_tree import AcceptedPath

_ROW_FIELDS = ("request_rows_B", "working_slots_B", "destinations_B")


class CommitRunner:
    """Executes one function `commit(inputs)` for up to `max_batch` rows and paths of up to `num_nodes` nodes.

    As `DecodeRunner`: one array to fill, one copy, one launch. Where sizes are bucketed all paths have room for
    `num_nodes` nodes. A padding row accepts nothing, on row 0 and slot 0.
    """

    def __init__(
        self,
        commit: Callable[[CommitInputs], None],
        *,
        max_batch: int,
        num_nodes: int,
        device: torch.device,
        buckets: Sequence[int] | None = None,
        capture: bool = False,
    ) -> None:
        """`buckets` and `capture` as for `StepGraphs`."""
        self._commit = commit
        self._num_nodes = num_nodes
        self._is_bucketed = buckets is not None
        self._arrays = StaticArrays(_shapes(max_batch if buckets is None else buckets[-1], num_nodes), device)
        self._graphs = StepGraphs(
            lambda size: self._run(size, num_nodes),
            self._load_padding,
            max_batch=max_batch,
            buckets=buckets,
            capture=capture,
        )

    def run(self, inputs: CommitInputs) -> None:
        """One commit of n rows. `inputs` are on the host, and may change once this returns."""
        num_rows, num_nodes = inputs.path.nodes_BT.shape
        if not self._is_bucketed:
            self._load(inputs, num_rows, num_nodes)
            self._run(num_rows, num_nodes)
            return
        bucket = self._graphs.padded(num_rows)
        self._load(inputs, bucket, self._num_nodes)
        self._graphs.run(bucket)

    def _load(self, inputs: CommitInputs, num_rows: int, num_nodes: int) -> None:
        arrays = {name: getattr(inputs, name).numpy() for name in _ROW_FIELDS}
        arrays |= {name: value.numpy() for name, value in inputs.path._asdict().items()}
        self._arrays.load(arrays, _shapes(num_rows, num_nodes), {})

    def _load_padding(self, bucket: int) -> None:
        nothing_B, nowhere_BL = torch.zeros(0, dtype=torch.int64), torch.zeros(0, self._num_nodes, dtype=torch.int64)
        path = AcceptedPath(nowhere_BL, nothing_B)
        self._load(CommitInputs(nothing_B, nothing_B, nothing_B, path), bucket, self._num_nodes)

    def _run(self, num_rows: int, num_nodes: int) -> tuple[Tensor, ...]:
        """The commit over what lies in the static tensors."""
        fields = self._arrays.views(_shapes(num_rows, num_nodes))
        path = AcceptedPath(**{name: fields[name] for name in AcceptedPath._fields})
        self._commit(CommitInputs(**{name: fields[name] for name in _ROW_FIELDS}, path=path))
        return ()


def _shapes(num_rows: int, num_nodes: int) -> Shapes:
    per_row = dict.fromkeys((*_ROW_FIELDS, "num_nodes_B"), (num_rows,))
    return {**per_row, "nodes_BT": (num_rows, num_nodes)}

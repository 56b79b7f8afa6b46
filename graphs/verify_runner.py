"""Runs verifies over static tensors: as CUDA graphs, one per number of rows, or by plain calls.

Shapes: B rows of a bucket, n rows of a step, T nodes of a draft tree, N = B T nodes row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.graphs.static_arrays import Shapes, StaticArrays
from hybrid_runtime.graphs.step_graphs import StepGraphs, batch_buckets
from hybrid_runtime.graphs.step_inputs import VerifyInputs, draw_inputs
from hybrid_runtime.ops.draft_tree import DraftTree, ancestors_of_bits, node_bits
from hybrid_runtime.ops.draw import DrawInputs

ROW_FIELDS = ("request_rows_B", "committed_lens_B", "working_slots_B")
NODE_FIELDS = ("token_ids_BT", "positions_BT", "kv_slots_BT", "parents_BT", "depths_BT", "ancestor_bits_BT")
DRAW_FIELDS = tuple(f"draw_{name}" for name in DrawInputs._fields)  # of nodes
Step = Callable[[VerifyInputs, DrawInputs], tuple[Tensor, ...]]


def verify_buckets(max_batch: int) -> tuple[int, ...]:
    """As `batch_buckets`, but none is above `max_batch`: records by place in the batch have no room for more rows."""
    return tuple(min(size, max_batch) for size in batch_buckets(max_batch))


class VerifyRunner:
    """Executes one step function `step(inputs, draw) -> tensors [N, ...]` for up to `max_batch` rows.

    As `DecodeRunner`: one array to fill, one copy, one launch. Where sizes are bucketed all trees have `num_nodes`
    nodes; a padding row has the tree of a row that drafts nothing, on row 0 and slot 0.

    Which nodes see which comes as one word of bits per node, which the host has from building the batch: unpacked
    on the device by two launches a step, where following parents there takes some ten that depend on each other.
    """

    def __init__(
        self,
        step: Step,
        *,
        max_batch: int,
        num_nodes: int,
        max_context_len: int,
        device: torch.device,
        buckets: Sequence[int] | None = None,
        capture: bool = False,
    ) -> None:
        """`buckets` and `capture` as for `StepGraphs`. Without buckets trees may have fewer than `num_nodes` nodes."""
        self._step = step
        self._num_nodes = num_nodes
        self._max_context_len = max_context_len
        self._is_bucketed = buckets is not None
        self._arrays = StaticArrays(_shapes(max_batch if buckets is None else buckets[-1], num_nodes), device)
        with torch.inference_mode(False):
            self._bit_T = node_bits(num_nodes, device)
        self._graphs = StepGraphs(
            lambda size: self._run(size, num_nodes),
            self._load_padding,
            max_batch=max_batch,
            buckets=buckets,
            capture=capture,
        )

    def run(self, arrays: Mapping[str, NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """One step of n rows; `arrays` are what ROW_FIELDS `[n]`, NODE_FIELDS `[n, T]` and DRAW_FIELDS `[n T]` name.

        Returns the step's tensors `[n T, ...]`.
        """
        num_rows, num_nodes = arrays["token_ids_BT"].shape
        if not self._is_bucketed:
            self._load(arrays, num_rows, num_nodes)
            return self._run(num_rows, num_nodes)
        assert num_nodes == self._num_nodes, f"trees of {num_nodes} nodes for graphs of {self._num_nodes}"
        bucket = self._graphs.padded(num_rows)
        self._load(arrays, bucket, num_nodes)
        return tuple(output[: num_rows * num_nodes] for output in self._graphs.run(bucket))

    def _load(self, arrays: Mapping[str, NDArray[np.int64]], num_rows: int, num_nodes: int) -> None:
        bit_T = np.left_shift(1, np.arange(num_nodes))
        self._arrays.load(arrays, _shapes(num_rows, num_nodes), {"ancestor_bits_BT": bit_T | 1})

    def _load_padding(self, bucket: int) -> None:
        shapes = _shapes(0, self._num_nodes)
        self._load({name: np.zeros(shape, np.int64) for name, shape in shapes.items()}, bucket, self._num_nodes)

    def _run(self, num_rows: int, num_nodes: int) -> tuple[Tensor, ...]:
        """The step over what lies in the static tensors."""
        fields = self._arrays.views(_shapes(num_rows, num_nodes))
        ancestors_BTT = ancestors_of_bits(fields["ancestor_bits_BT"], self._bit_T[:num_nodes])
        inputs = VerifyInputs(
            token_ids_BT=fields["token_ids_BT"],
            positions_BT=fields["positions_BT"],
            kv_slots_BT=fields["kv_slots_BT"],
            request_rows_B=fields["request_rows_B"],
            committed_lens_B=fields["committed_lens_B"],
            max_context_len=self._max_context_len,
            working_slots_B=fields["working_slots_B"],
            tree=DraftTree(fields["parents_BT"], fields["depths_BT"], ancestors_BTT),
        )
        return self._step(inputs, draw_inputs([fields[name] for name in DRAW_FIELDS]))


def _shapes(num_rows: int, num_nodes: int) -> Shapes:
    return {
        **dict.fromkeys(ROW_FIELDS, (num_rows,)),
        **dict.fromkeys(NODE_FIELDS, (num_rows, num_nodes)),
        **dict.fromkeys(DRAW_FIELDS, (num_rows * num_nodes,)),
    }

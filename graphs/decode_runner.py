"""Runs decode steps over static tensors of pool indices: as CUDA graphs, one per batch size, or by plain calls.

Shapes: B rows of a bucket, n rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.graphs.static_arrays import Shapes, StaticArrays, aligned
from hybrid_runtime.graphs.step_graphs import StepGraphs
from hybrid_runtime.graphs.step_inputs import DecodeInputs, draw_inputs
from hybrid_runtime.ops.draw import DrawInputs

# What a step reads of each row, first for the model, then, as `draw_inputs` takes it, for the choice of its token.
MODEL_FIELDS = ("token_ids_B", "positions_B", "kv_slots_B", "request_rows_B", "context_lens_B", "working_slots_B")
_NUM_FIELDS = len(MODEL_FIELDS) + len(DrawInputs._fields)
_PADDING_F1 = np.zeros((_NUM_FIELDS, 1), dtype=np.int64)  # a temperature of 0 is greedy
_PADDING_F1[MODEL_FIELDS.index("context_lens_B")] = 1
_FIELDS = "fields_FB"
Step = Callable[[DecodeInputs, DrawInputs], tuple[Tensor, ...]]


class DecodeRunner:
    """Executes one step function `step(inputs, draw) -> tensors [B, ...]` for any number of rows up to `max_batch`.

    The inputs are views of static int64 tensors: a step costs the host one array to fill, one copy to the device and
    one launch. Rows that fill up a bucket are padding: row 0 and slot 0, whose content no request sees. Buckets and
    `capture` are those of `StepGraphs`.
    """

    def __init__(
        self,
        step: Step,
        *,
        max_batch: int,
        max_context_len: int,
        device: torch.device,
        buckets: Sequence[int] | None = None,
        capture: bool = False,
    ) -> None:
        self._step = step
        self._max_context_len = max_context_len
        self._inputs: dict[int, tuple[DecodeInputs, DrawInputs]] = {}
        self._arrays = StaticArrays(_shapes(max_batch if buckets is None else buckets[-1]), device)
        self._graphs = StepGraphs(self._run, self._load_padding, max_batch=max_batch, buckets=buckets, capture=capture)

    def run(self, fields_Fn: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """One step of n rows; `fields_Fn` holds what MODEL_FIELDS names, then the draw's fields.

        Returns the step's tensors `[n, ...]`.
        """
        num_rows = fields_Fn.shape[1]
        bucket = self._graphs.padded(num_rows)
        self._load(fields_Fn, bucket)
        outputs = self._graphs.run(bucket)
        return outputs if num_rows == bucket else tuple(output[:num_rows] for output in outputs)

    def _load(self, fields_Fn: NDArray[np.int64], bucket: int) -> None:
        self._arrays.load({_FIELDS: fields_Fn}, _shapes(bucket), {_FIELDS: _PADDING_F1})

    def _load_padding(self, bucket: int) -> None:
        self._load(np.zeros((_NUM_FIELDS, 0), dtype=np.int64), bucket)

    def _run(self, num_rows: int) -> tuple[Tensor, ...]:
        return self._step(*self._inputs_of(num_rows))

    def _inputs_of(self, bucket: int) -> tuple[DecodeInputs, DrawInputs]:
        """Views of the static tensors: the same objects for every step of a bucket."""
        if bucket not in self._inputs:
            fields_FB = self._arrays.views(_shapes(bucket))[_FIELDS][:, :bucket]
            of_model = dict(zip(MODEL_FIELDS, fields_FB, strict=False))
            inputs = DecodeInputs(**of_model, max_context_len=self._max_context_len)
            self._inputs[bucket] = (inputs, draw_inputs(fields_FB[len(MODEL_FIELDS) :]))
        return self._inputs[bucket]


def _shapes(num_rows: int) -> Shapes:
    """Every field starts where an array may start."""
    return {_FIELDS: (_NUM_FIELDS, aligned(num_rows))}

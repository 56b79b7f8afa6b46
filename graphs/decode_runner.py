"""Runs decode steps over static tensors of pool indices: as CUDA graphs, one per batch size, or by plain calls.

Shapes: B rows of a bucket, n rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, draw_inputs
from hybrid_runtime.ops.draw import DrawInputs

# What a step reads of each row, first for the model, then, as `draw_inputs` takes it, for the choice of its token.
MODEL_FIELDS = ("token_ids_B", "positions_B", "kv_slots_B", "request_rows_B", "context_lens_B", "working_slots_B")
_NUM_FIELDS = len(MODEL_FIELDS) + len(DrawInputs._fields)
_PADDING = np.zeros((_NUM_FIELDS, 1), dtype=np.int64)  # a temperature of 0 is greedy
_PADDING[MODEL_FIELDS.index("context_lens_B")] = 1
_ALIGNMENT = 8  # int64 elements: every field starts at a multiple of 64 bytes
_NUM_STAGING = 3  # a step's staging is not written again before the two after it have been launched
Step = Callable[[DecodeInputs, DrawInputs], tuple[Tensor, ...]]


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Sizes that steps are padded to: 1, 2, 4, then multiples of 8, up to at least `max_batch`.

    At most 7 rows are padding, and 32 sizes serve 240 rows.
    """
    sizes = [1, 2, 4, *range(8, max_batch + 8, 8)]
    return tuple(size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] < max_batch)


class DecodeRunner:
    """Executes one step function `step(inputs, draw) -> tensors [B, ...]` for any number of rows up to `max_batch`.

    The inputs are views of static int64 tensors: a step costs the host one array to fill, one copy to the device and
    one launch. Rows that fill up a bucket are padding: row 0 and slot 0, whose content no request sees.

    With `capture` (CUDA alone) each bucket is a CUDA graph, captured largest first over one memory pool when the runner
    is made, and results are static tensors that the next step of that bucket overwrites. Otherwise `step` is called.
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
        """`buckets`: ascending sizes that steps are padded to, the last at least `max_batch`; None: no padding."""
        if buckets is not None and (list(buckets) != sorted(set(buckets)) or buckets[-1] < max_batch):
            raise ValueError(f"buckets {tuple(buckets)} must ascend to {max_batch} or more")
        if capture and buckets is None:
            raise ValueError("captured steps need buckets")
        self._step = step
        self._buckets = None if buckets is None else tuple(buckets)
        self._max_context_len = max_context_len
        size = -(-(max_batch if buckets is None else buckets[-1]) // _ALIGNMENT) * _ALIGNMENT
        on_cuda = device.type == "cuda"
        with torch.inference_mode(False):  # writable in either mode, as the pools
            self._fields_FB = torch.zeros(_NUM_FIELDS, size, dtype=torch.int64, device=device)
            self._staging = [
                torch.zeros(_NUM_FIELDS, size, dtype=torch.int64, pin_memory=on_cuda) for _ in range(_NUM_STAGING)
            ]
        self._turn = 0
        self._inputs: dict[int, tuple[DecodeInputs, DrawInputs]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        if capture:
            assert self._buckets is not None
            self._capture(self._buckets)

    def run(self, fields_Fn: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """One step of n rows; `fields_Fn` holds what MODEL_FIELDS names, then the draw's fields.

        Returns the step's tensors `[n, ...]`.
        """
        num_rows = fields_Fn.shape[1]
        bucket = self._bucket(num_rows)
        self._load(fields_Fn, bucket)
        if bucket in self._graphs:
            graph, outputs = self._graphs[bucket]
            graph.replay()
        else:
            outputs = self._step(*self._inputs_of(bucket))
        return outputs if num_rows == bucket else tuple(output[:num_rows] for output in outputs)

    def _bucket(self, num_rows: int) -> int:
        if self._buckets is None:
            return num_rows
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def _load(self, fields_Fn: NDArray[np.int64], bucket: int) -> None:
        staging_FB = self._staging[self._turn]
        self._turn = (self._turn + 1) % _NUM_STAGING
        num_rows = fields_Fn.shape[1]
        host_FB = staging_FB.numpy()
        host_FB[:, :num_rows] = fields_Fn
        host_FB[:, num_rows:bucket] = _PADDING
        self._fields_FB[:, :bucket].copy_(staging_FB[:, :bucket], non_blocking=True)

    def _inputs_of(self, bucket: int) -> tuple[DecodeInputs, DrawInputs]:
        """Views of the static tensors: the same objects for every step of a bucket."""
        if bucket not in self._inputs:
            fields_FB = self._fields_FB[:, :bucket]
            of_model = dict(zip(MODEL_FIELDS, fields_FB, strict=False))
            inputs = DecodeInputs(**of_model, max_context_len=self._max_context_len)
            self._inputs[bucket] = (inputs, draw_inputs(fields_FB[len(MODEL_FIELDS) :]))
        return self._inputs[bucket]

    def _capture(self, buckets: Sequence[int]) -> None:
        """Captures every bucket; steps run on padding rows meanwhile."""
        pool = torch.cuda.graph_pool_handle()
        for bucket in sorted(buckets, reverse=True):
            inputs = self._inputs_of(bucket)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lazy initialisations must not be captured
                self._step(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self._step(*inputs)
            self._graphs[bucket] = (graph, outputs)

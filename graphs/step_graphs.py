"""A step for batches of some sizes, each captured as a CUDA graph, or called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Sizes that steps are padded to: 1, 2, 4, then multiples of 8, up to at least `max_batch`.

    At most 7 rows are padding, and 32 sizes serve 240 rows.
    """
    sizes = [1, 2, 4, *range(8, max_batch + 8, 8)]
    return tuple(size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] < max_batch)


class StepGraphs:
    """Runs `step(size)` for batches of a size; it reads tensors that stay where they are, and returns tensors.

    With `capture` (CUDA alone) each bucket is a CUDA graph, captured largest first over one memory pool when this is
    made, and results are static tensors that the next step of that bucket overwrites. Otherwise `step` is called.
    """

    def __init__(
        self,
        step: Callable[[int], tuple[Tensor, ...]],
        load_padding: Callable[[int], None],
        *,
        max_batch: int,
        buckets: Sequence[int] | None = None,
        capture: bool = False,
    ) -> None:
        """`buckets`: ascending sizes that steps are padded to, the last at least `max_batch`; None: no padding.

        `load_padding(size)` makes all rows of a bucket padding: a step runs twice on them when it is captured.
        """
        if buckets is not None and (list(buckets) != sorted(set(buckets)) or buckets[-1] < max_batch):
            raise ValueError(f"buckets {tuple(buckets)} must ascend to {max_batch} or more")
        if capture and buckets is None:
            raise ValueError("captured steps need buckets")
        self._step = step
        self._load_padding = load_padding
        self._buckets = None if buckets is None else tuple(buckets)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        if capture:
            assert self._buckets is not None
            self._capture(self._buckets)

    def padded(self, num_rows: int) -> int:
        """The size that a step of so many rows is padded to."""
        if self._buckets is None:
            return num_rows
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def run(self, size: int) -> tuple[Tensor, ...]:
        """The step for a size that `padded` gave."""
        if size not in self._graphs:
            return self._step(size)
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def _capture(self, buckets: Sequence[int]) -> None:
        pool = torch.cuda.graph_pool_handle()
        for bucket in sorted(buckets, reverse=True):
            self._load_padding(bucket)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lazy initialisations must not be captured
                self._step(bucket)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self._step(bucket)
            self._graphs[bucket] = (graph, outputs)

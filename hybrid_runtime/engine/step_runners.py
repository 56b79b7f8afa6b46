"""The runners of a runtime's steps: bucketed and captured where the steps can be, plain calls otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybrid_runtime.engine.steps import SpeculativeSteps, Steps
from hybrid_runtime.graphs.commit_runner import CommitRunner
from hybrid_runtime.graphs.decode_runner import DecodeRunner
from hybrid_runtime.graphs.step_graphs import batch_buckets
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.graphs.verify_runner import Step as VerifyStep
from hybrid_runtime.graphs.verify_runner import VerifyRunner, verify_buckets


def decode_runner(steps: Steps, max_batch: int, device: torch.device) -> DecodeRunner:
    """Of `steps.decode`."""
    return DecodeRunner(
        steps.decode,
        max_batch=max_batch,
        max_context_len=steps.max_context_len,
        device=device,
        buckets=batch_buckets(max_batch) if steps.can_be_captured else None,
        capture=steps.can_be_captured,
    )


def verify_runner(
    verify: VerifyStep, steps: Steps, speculative: SpeculativeSteps, max_batch: int, device: torch.device
) -> VerifyRunner:
    """Of `verify`, which calls `steps.verify`."""
    return VerifyRunner(
        verify,
        max_batch=max_batch,
        num_nodes=speculative.num_nodes,
        max_context_len=steps.max_context_len,
        device=device,
        buckets=verify_buckets(max_batch) if steps.can_be_captured else None,
        capture=steps.can_be_captured,
    )


def commit_runner(
    commit: Callable[[CommitInputs], None],
    steps: Steps,
    speculative: SpeculativeSteps,
    max_batch: int,
    device: torch.device,
) -> CommitRunner:
    """Of `commit`, which calls `steps.commit`. A lazy rollback goes by the longest path, and is not captured."""
    capture = steps.can_be_captured and not speculative.rollback.is_lazy
    return CommitRunner(
        commit,
        max_batch=max_batch,
        num_nodes=speculative.num_nodes,
        device=device,
        buckets=verify_buckets(max_batch) if capture else None,
        capture=capture,
    )

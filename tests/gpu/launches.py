"""What a decode step asks of the driver: one graph launch, and no wait for the device before its results are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime
from tests.engine.helpers import greedy, random_tokens
from tests.gpu.report import Details

NUM_STEPS = 12
BATCH = 5
GRAPH_LAUNCH = "cudaGraphLaunch"


def one_launch_per_decode_step(reference: PreTrainedModel, device: str, compile_mode: str = "auto") -> Details:
    """Counts calls of the CUDA runtime over steps that only decode. On a CPU there are none to count."""
    rng = np.random.default_rng(0)
    with HybridRuntime(
        reference, dtype="bfloat16", device=device, compile=compile_mode, max_num_seqs=8, max_model_len=128
    ) as rt:
        for _ in range(BATCH):
            rt.add_request(random_tokens(rng, 20), greedy(3 * NUM_STEPS))
        for _ in range(4):  # prefill, and the first decodes
            rt.step()
        before = rt.stats().scheduler.num_decode_tokens
        with _syncs_are_errors(rt.model.device):
            for _ in range(NUM_STEPS):
                rt.step()
        activities = [ProfilerActivity.CPU]
        if rt.model.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            for _ in range(NUM_STEPS):
                rt.step()
        decoded = rt.stats().scheduler.num_decode_tokens - before
        assert abs(decoded - 2 * NUM_STEPS * BATCH) <= BATCH, f"{decoded} tokens were decoded"
    calls = Counter(event.name for event in profiler.events() if event.name.startswith(("cuda", "cuLaunch")))
    if rt.model.device.type == "cuda":
        assert calls[GRAPH_LAUNCH] == NUM_STEPS, f"{calls[GRAPH_LAUNCH]} graph launches in {NUM_STEPS} steps"
    return {"steps": NUM_STEPS, "calls per step": {name: count / NUM_STEPS for name, count in calls.items()}}


@contextmanager
def _syncs_are_errors(device: torch.device) -> Iterator[None]:
    """Lets PyTorch raise where an operation would wait for the device; waiting for an event is no such operation."""
    if device.type != "cuda":
        yield
        return
    mode: Any = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)

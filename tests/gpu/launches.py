"""What steps ask of the driver: a decode one graph launch, a speculative round two; no wait for the device before
results are read.
"""

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
from tests.engine.helpers import greedy, random_tokens, tokens_of
from tests.gpu.report import Details
from tests.speculative.scripted_drafter import PARTLY, ScriptedDrafter
from tests.speculative.speculative_runs import config

NUM_STEPS = 12
NUM_ROUNDS = 4
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
        with profile(activities=_activities(rt.model.device)) as profiler:
            for _ in range(NUM_STEPS):
                rt.step()
        decoded = rt.stats().scheduler.num_decode_tokens - before
        assert abs(decoded - 2 * NUM_STEPS * BATCH) <= BATCH, f"{decoded} tokens were decoded"
    calls = Counter(event.name for event in profiler.events() if event.name.startswith(("cuda", "cuLaunch")))
    if rt.model.device.type == "cuda":
        assert calls[GRAPH_LAUNCH] == NUM_STEPS, f"{calls[GRAPH_LAUNCH]} graph launches in {NUM_STEPS} steps"
    return {"steps": NUM_STEPS, "calls per step": {name: count / NUM_STEPS for name, count in calls.items()}}


def two_launches_per_round(reference: PreTrainedModel, device: str, compile_mode: str = "auto") -> Details:
    """Counts graph launches of steps in which every row is verified: one of the verify, one of its commit."""
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, 20) for _ in range(BATCH)]
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": device,
        "compile": compile_mode,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "enable_prefix_cache": False,  # a commit that leaves a checkpoint is launched twice
    }
    with HybridRuntime(reference, **options) as rt:
        texts = [[*p, *text] for p, text in zip(prompts, tokens_of(rt.generate(prompts, greedy(60))), strict=True)]
    drafter = ScriptedDrafter(texts, kinds=(PARTLY,))
    with HybridRuntime(reference, **options, speculative=config("fold"), drafter=drafter) as rt:
        for prompt in prompts:
            rt.add_request(prompt, greedy(60))
        for _ in range(2):  # prefill, and a first round
            rt.step()
        before = rt._engine.runner.num_verify_forwards
        with profile(activities=_activities(rt.model.device)) as profiler:
            for _ in range(NUM_ROUNDS):
                rt.step()
        num_verifies = rt._engine.runner.num_verify_forwards - before
    assert num_verifies == NUM_ROUNDS, f"{num_verifies} verifies in {NUM_ROUNDS} steps"
    num_launches = sum(event.name == GRAPH_LAUNCH for event in profiler.events())
    if rt.model.device.type == "cuda":
        assert num_launches == 2 * NUM_ROUNDS, f"{num_launches} graph launches in {NUM_ROUNDS} rounds"
    return {"rounds": NUM_ROUNDS, "graph launches": num_launches}


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


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

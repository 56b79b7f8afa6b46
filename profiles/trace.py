"""A trace of a serving workload by PyTorch's profiler, to be opened in Perfetto or chrome://tracing.

    python profiles/trace.py [--model tiny | --config profiles/models/granite-h-350m] [--out trace.json.gz]

Requests that share a few long prefixes arrive one after another, so that prefills, decodes of several sizes, prefix
hits and evictions mix. The engine's phases show as ranges, with the same names as in Nsight Systems (NVTX); a table
sums them up. Steps before the trace begins warm everything up.

With `--no-profile` nothing is recorded: the steps run under an NVTX range `steady`, for `nsight.sh`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import random_model
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from hybrid_runtime import HybridRuntime, SamplingParams
from hybrid_runtime.engine.ranges import Range

PHASES = re.compile(r"(step|schedule|prepare|load|copy|run\.\w+(\.b\d+)?|apply|cache\.\w+)")
NUM_PREFIXES = 4
MAX_NEW = 64  # tokens of a prompt behind its prefix
MAX_OUTPUT = 24


def main() -> None:
    options = _parser().parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with _runtime(options) as rt:
        workload = Workload(rt, options.prefix, options.batch)
        workload.run(options.warmup_steps)
        if options.no_profile:
            with Range("steady"):
                workload.run(options.steps)
            return
        with _profiled(rt.model.device, options.out) as profiler:
            workload.run(options.steps)
        Console().print(phase_table(profiler))
        Console().print(f"{options.steps} steps, {workload.num_arrived} requests; trace: {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a checkpoint, as HybridRuntime takes it")
    parser.add_argument("--config", type=Path, help="instead: a folder with a config.json; weights are random")
    parser.add_argument("--dtype", default="bfloat16", help="of a model with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of a CPU; default: PyTorch's choice")
    parser.add_argument("--compile", default="auto", choices=["auto", "off"])
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--prefix", type=int, default=192, help="tokens of each shared prefix")
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("trace.json.gz"))
    return parser


def _runtime(options: argparse.Namespace) -> HybridRuntime:
    """With pools so small that the workload evicts, and so few tokens per step that prompts come in chunks."""
    max_len = options.prefix + MAX_NEW + MAX_OUTPUT
    model: Any = options.model
    if options.config is not None:
        model = random_model(options.config, getattr(torch, options.dtype), torch.device(options.device))
    return HybridRuntime(
        model,
        device=options.device,
        compile=options.compile,
        max_num_seqs=options.batch,
        max_model_len=max_len,
        max_num_batched_tokens=max(32, options.prefix // 2),
        num_kv_slots=(options.batch + NUM_PREFIXES) * max_len,
        num_state_slots=3 * options.batch + NUM_PREFIXES,
    )


class Workload:
    """Keeps a runtime busy: whenever a request ends, another one arrives a few steps later."""

    def __init__(self, rt: HybridRuntime, prefix_len: int, batch: int) -> None:
        self.rt = rt
        self.batch = batch
        self.num_arrived = 0
        self._num_running = 0
        self._rng = np.random.default_rng(0)
        self._prefixes = [self._draw(prefix_len) for _ in range(NUM_PREFIXES)]

    def run(self, num_steps: int) -> None:
        """Some engine steps, with arrivals in between."""
        for _ in range(num_steps):
            if self._num_running < self.batch and (self._num_running == 0 or self._rng.random() < 0.5):
                self._arrive()
            with Range("step"):
                outputs = self.rt.step()
            self._num_running -= sum(output.finished for output in outputs)

    def _arrive(self) -> None:
        prefix = self._prefixes[int(self._rng.integers(NUM_PREFIXES))]
        prompt = prefix + self._draw(int(self._rng.integers(1, MAX_NEW)))
        max_tokens = int(self._rng.integers(4, MAX_OUTPUT))
        self.rt.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        self.num_arrived += 1
        self._num_running += 1

    def _draw(self, length: int) -> list[int]:
        return self._rng.integers(3, self.rt.model.spec.vocab_size, size=length).tolist()


@contextmanager
def _profiled(device: torch.device, out: Path) -> Iterator[profile]:
    """Records what runs meanwhile, and writes the trace."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield profiler
    out.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(out))


def phase_table(profiler: profile) -> Table:
    """Number, sum and mean duration of each of the engine's phases."""
    table = Table("phase", "times", "ms", "us each")
    for event in sorted(profiler.key_averages(), key=lambda event: -event.cpu_time_total):
        if PHASES.fullmatch(event.key):
            total = event.cpu_time_total  # microseconds
            table.add_row(event.key, str(event.count), f"{total / 1000:.2f}", f"{total / event.count:.1f}")
    return table


if __name__ == "__main__":
    main()

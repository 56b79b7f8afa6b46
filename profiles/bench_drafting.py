"""What prompt lookup costs where it never hits: the share of a request's time that goes into drafting.

    python profiles/bench_drafting.py [--threads 2] [--repeats 5] [--batches 1,4,16] [--tokens 128]
        [--out profiles/results/bench_drafting.json]

Prompts and outputs are random tokens, in which no run of eight repeats. Two runtimes that are alike differ by more from
minute to minute than drafting takes; so its time is taken where it is spent, budgets and bookkeeping included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from measuring import write_results

from hybrid_runtime import HybridRuntime, SamplingParams, SpeculativeConfig
from hybrid_runtime.scheduling.drafting import Drafting
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.speculative.draft import Draft

PROMPT_TOKENS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128, help="that each request decodes")
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runtime = HybridRuntime(
        "tiny",
        compile=options.compile,
        max_num_seqs=max(options.batches),
        max_model_len=1024,
        memory_bytes=2**30,
        speculative=SpeculativeConfig("ngram", num_steps=4, ngram_min=8, ngram_max=8),
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=options.tokens, temperature=8.0, ignore_eos=True, seed=1)
    rows = []
    with runtime:
        for batch in options.batches:
            shares, seconds_per_step = [], []
            for turn in range(options.repeats + 1):
                shape = (batch, PROMPT_TOKENS)
                prompts = rng.integers(3, runtime.model.spec.vocab_size, shape).tolist()
                share, seconds = _share_of_drafting(runtime, prompts, params)
                if turn:  # the first is not counted
                    shares.append(share)
                    seconds_per_step.append(seconds / options.tokens)
            rows.append(
                {
                    "batch": batch,
                    "share": statistics.median(shares),
                    "us_per_step": 1e6 * statistics.median(seconds_per_step),
                }
            )
            print(f"batch {batch}: {rows[-1]['share']:.2%} of the time, {rows[-1]['us_per_step']:.0f} us per step")
        stats = runtime.stats().speculation
        assert stats is not None
        assert stats.num_drafted_tokens == 0
    write_results(options.out, {"rows": rows, "num_tokens": options.tokens})


def _share_of_drafting(
    runtime: HybridRuntime, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[float, float]:
    """And its seconds."""
    draft, spent = Drafting.__call__, 0.0

    def timed(self: Drafting, requests: Sequence[Request]) -> Mapping[Request, Draft]:
        nonlocal spent
        start = time.perf_counter()
        drafts = draft(self, requests)
        spent += time.perf_counter() - start
        return drafts

    start = time.perf_counter()
    with mock.patch.object(Drafting, "__call__", timed):
        runtime.generate(list(prompts), params)
    return spent / (time.perf_counter() - start), spent


if __name__ == "__main__":
    main()

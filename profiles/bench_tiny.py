"""Prefill, decode and prefix hits of the bundled model, beside `generate` of transformers on the same weights.

    python profiles/bench_tiny.py [--threads 2] [--repeats 5] [--out profiles/results/bench_tiny.json]

Medians over the repeats, after one round that is not counted. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from measuring import median, write_results
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hybrid_runtime import HybridRuntime, SamplingParams
from hybrid_runtime.models.loading import TINY_CHECKPOINT

PROMPT_LEN = 1024
NUM_DECODED = 64
BATCHES = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()

    figures = {**_measure_runtime(options.repeats), **_measure_transformers(options.repeats)}
    table = Table("figure", "median", "unit")
    for name, (value, unit) in figures.items():
        table.add_row(name, f"{value:,.1f}", unit)
    Console().print(table)
    write_results(options.out, {name: {"median": value, "unit": unit} for name, (value, unit) in figures.items()})


def _measure_runtime(repeats: int) -> dict[str, tuple[float, str]]:
    rng = np.random.default_rng(0)
    figures: dict[str, tuple[float, str]] = {}
    with HybridRuntime("tiny", max_num_batched_tokens=PROMPT_LEN) as rt:

        def draw(length: int) -> list[int]:
            return rng.integers(3, rt.model.spec.vocab_size, size=length).tolist()

        def first_token_seconds(prompt: list[int]) -> float:
            [output] = rt.generate(prompt, _greedy(1))
            return output.metrics.time_to_first_token or 0.0

        cold = median(lambda: first_token_seconds(draw(PROMPT_LEN)), repeats)
        figures[f"prefill of {PROMPT_LEN} tokens"] = PROMPT_LEN / cold, "tok/s"
        figures[f"first token, {PROMPT_LEN} tokens, cold"] = 1000 * cold, "ms"
        prompt = draw(PROMPT_LEN)
        first_token_seconds(prompt)
        figures["first token, the same prompt again"] = (
            1000 * median(lambda: first_token_seconds(prompt), repeats),
            "ms",
        )

        def prefix_seconds() -> float:
            return first_token_seconds(prompt[:-1] + draw(32))

        figures["first token, 32 new tokens behind a cached prefix"] = 1000 * median(prefix_seconds, repeats), "ms"
        for batch in BATCHES:

            def step_seconds(batch: int = batch) -> float:
                outputs = rt.generate([draw(32) for _ in range(batch)], _greedy(NUM_DECODED))
                starts = [output.metrics.first_token_time or 0.0 for output in outputs]
                ends = [output.metrics.finished_time or 0.0 for output in outputs]
                return (max(ends) - max(starts)) / (NUM_DECODED - 1)

            figures[f"decode step, batch {batch}"] = 1000 * median(step_seconds, repeats), "ms"
    return figures


def _measure_transformers(repeats: int) -> dict[str, tuple[float, str]]:
    model = AutoModelForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype="auto").eval()
    rng = torch.Generator().manual_seed(0)

    def seconds(prompt_len: int, num_tokens: int) -> float:
        ids = torch.randint(3, model.config.vocab_size, (1, prompt_len), generator=rng)
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    prefill = median(lambda: seconds(PROMPT_LEN, 1), repeats)
    decode = median(lambda: seconds(32, NUM_DECODED) - seconds(32, 1), repeats) / (NUM_DECODED - 1)
    return {
        f"transformers: prefill of {PROMPT_LEN} tokens": (PROMPT_LEN / prefill, "tok/s"),
        "transformers: decode step, batch 1": (1000 * decode, "ms"),
    }


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


if __name__ == "__main__":
    main()

"""Speculative decoding on the bundled model, beside plain decoding: tokens per second, and tokens per round.

    python profiles/bench_speculative.py [--threads 2] [--repeats 5] [--batches 1,4,16] [--tokens 128] [--quick]
        [--out profiles/results/bench_speculative.json]

Prompts are the beginnings of Python files that the model was not trained on (those of the standard library of the
Python that runs this); everything is greedy. All settings take turns, so that one that runs in a bad minute does not
run there alone: ratios to plain decoding are medians of ratios within one turn. "ngram, no hit" looks up eight tokens
in texts of random tokens, where nothing repeats: what is left is what looking up costs. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import write_results
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hybrid_runtime import HybridRuntime, SamplingParams, SpeculativeConfig
from hybrid_runtime.training.corpus import read_corpus

PROMPT_CHARACTERS = 400
NUM_PROMPTS = 16
PLAIN = "plain"
NO_HIT = "ngram, no hit"


@dataclass(frozen=True)
class Setting:
    name: str
    speculative: SpeculativeConfig | None


def settings(*, quick: bool) -> list[Setting]:
    """Plain decoding first."""

    def mtp(topk: int, num_steps: int, num_nodes: int, rollback: str = "fold") -> Setting:
        shape = "chain" if topk == 1 else f"tree of topk {topk}"
        config = SpeculativeConfig("mtp", num_steps=num_steps, topk=topk, num_draft_tokens=num_nodes, rollback=rollback)
        return Setting(f"mtp {shape}, T = {num_nodes}, {rollback}", config)

    def ngram(num_steps: int) -> Setting:
        config = SpeculativeConfig("ngram", num_steps=num_steps)
        return Setting(f"ngram chain, T = {num_steps + 1}, fold", config)

    never = SpeculativeConfig("ngram", num_steps=4, ngram_min=8, ngram_max=8)
    if quick:
        return [Setting(PLAIN, None), mtp(1, 3, 4), Setting(NO_HIT, never)]
    return [
        Setting(PLAIN, None),
        *(mtp(1, num_nodes - 1, num_nodes) for num_nodes in (2, 4, 6, 8)),
        *(
            mtp(topk, num_steps, num_nodes)
            for topk, num_steps, num_nodes in ((2, 3, 8), (2, 5, 16), (4, 5, 32), (4, 5, 63))
        ),
        mtp(1, 3, 4, "snapshot"),
        mtp(1, 3, 4, "replay"),
        *(ngram(num_steps) for num_steps in (3, 7, 15)),
        Setting(NO_HIT, never),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128, help="that each request decodes")
    parser.add_argument("--quick", action="store_true", help="three settings, once: to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batches = [2] if options.quick else options.batches
    chosen = settings(quick=options.quick)
    with ExitStack() as stack:
        runtimes = [stack.enter_context(_runtime(setting.speculative, max(batches))) for setting in chosen]
        rows = [
            row
            for batch in batches
            for row in _measure(chosen, runtimes, batch, options.tokens, 1 if options.quick else options.repeats)
        ]
    _print(rows)
    write_results(options.out, {"rows": rows, "num_tokens": options.tokens})


def _runtime(speculative: SpeculativeConfig | None, max_batch: int) -> HybridRuntime:
    return HybridRuntime(
        "tiny", max_num_seqs=max_batch, max_model_len=1024, memory_bytes=2**30, speculative=speculative
    )


def _measure(
    chosen: Sequence[Setting], runtimes: Sequence[HybridRuntime], batch: int, num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """One row per setting at a batch size, all over the same prompts."""
    code = _code_prompts(runtimes[0])
    noise = _noise_prompts(runtimes[0])
    speeds: list[list[float]] = [[] for _ in chosen]
    noise_speeds: list[tuple[float, float]] = []  # plain, and looking up in vain
    counts = [_Counts.of(runtime) for runtime in runtimes]
    never = next(place for place, setting in enumerate(chosen) if setting.name == NO_HIT)
    for turn in tqdm(range(repeats + 1), desc=f"batch {batch}", leave=False):
        if turn == 1:  # the one before is not counted
            counts = [_Counts.of(runtime) for runtime in runtimes]
        for place, runtime in enumerate(runtimes):
            if place == never:
                of_both = [
                    _tokens_per_second(runtimes[i], noise, batch, num_tokens, temperature=8.0) for i in (0, never)
                ]
                if turn:
                    noise_speeds.append((of_both[0], of_both[1]))
                continue
            speed = _tokens_per_second(runtime, code, batch, num_tokens, temperature=0.0)
            if turn:
                speeds[place].append(speed)
    rows = []
    for place, setting in enumerate(chosen):
        ratios = [speed / plain for speed, plain in zip(speeds[place], speeds[0], strict=False)]
        ours = speeds[place]
        if place == never:
            ours = [mine for _, mine in noise_speeds]
            ratios = [mine / plain for plain, mine in noise_speeds]
        since = _Counts.of(runtimes[place]).minus(counts[place])
        rows.append(
            {
                "setting": setting.name,
                "batch": batch,
                "tokens_per_second": statistics.median(ours),
                "times_plain": statistics.median(ratios),
                "tokens_per_round": 1 + since.num_accepted / since.num_rows if since.num_rows else None,
                "share_accepted": since.num_accepted / since.num_drafted if since.num_drafted else None,
            }
        )
    return rows


@dataclass(frozen=True)
class _Counts:
    num_rows: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(cls, runtime: HybridRuntime) -> _Counts:
        stats = runtime.stats().speculation
        if stats is None:
            return cls(0, 0, 0)
        return cls(stats.num_verified_rows, stats.num_drafted_tokens, stats.num_accepted_tokens)

    def minus(self, other: _Counts) -> _Counts:
        return _Counts(
            self.num_rows - other.num_rows,
            self.num_drafted - other.num_drafted,
            self.num_accepted - other.num_accepted,
        )


def _tokens_per_second(
    runtime: HybridRuntime, prompts: Sequence[list[int]], batch: int, num_tokens: int, *, temperature: float
) -> float:
    """Of decoding alone: from the first token of all requests to the last."""
    runtime.reset_prefix_cache()
    tokens = seconds = 0.0
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=True, seed=1)
    rounds = [prompts[first : first + batch] for first in range(0, NUM_PROMPTS if batch > 1 else 4, batch)]
    for part in rounds:
        outputs = runtime.generate(part, params)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        first = max(output.metrics.first_token_time or 0.0 for output in outputs)
        last = max(output.metrics.finished_time or 0.0 for output in outputs)
        seconds += last - first
        tokens += len(outputs) * (num_tokens - 1)
    return tokens / seconds


def _code_prompts(runtime: HybridRuntime) -> list[list[int]]:
    """Of long files, so that there is something to go on with."""
    files = [file for file in read_corpus().held_out if len(file.text) > 10 * PROMPT_CHARACTERS]
    every = len(files) // NUM_PROMPTS
    texts = [file.text[:PROMPT_CHARACTERS] for file in files[::every][:NUM_PROMPTS]]
    assert runtime.tokenizer is not None
    return [runtime.tokenizer(text)["input_ids"] for text in texts]


def _noise_prompts(runtime: HybridRuntime) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, runtime.model.spec.vocab_size, 100).tolist() for _ in range(NUM_PROMPTS)]


def _print(rows: Sequence[dict[str, Any]]) -> None:
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("setting", lambda row: row["setting"]),
        ("batch", lambda row: str(row["batch"])),
        ("tok/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("times plain", lambda row: f"{row['times_plain']:.2f}"),
        ("tokens per round", lambda row: _or_dash(row["tokens_per_round"])),
        ("share accepted", lambda row: _or_dash(row["share_accepted"])),
    ]
    table = Table(*(name for name, _ in columns))
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    Console(width=120).print(table)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()

"""What periodic checkpoints of decoded tokens cost, and what they save: `track_interval` 1, 64, 256 and off.

    python profiles/bench_track.py [--threads 2] [--repeats 5] [--out profiles/results/bench_track.json]

Cost: milliseconds of a decode step. Saving: a turn of 4 to 512 decoded tokens ends, and what follows has other tokens
in place of its last four, as behind a stop string or where text is tokenised again. The final state is of no use then:
what lies between the latest periodic checkpoint (or else the prompt's) and these four is computed again. A request
keeps the latest periodic checkpoint only, so an interval as short as the change saves nothing. (A preempted request
resumes from its working slot and computes nothing again, whatever the interval.) On the bundled model; run it when
nothing else runs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import median, write_results
from rich.console import Console
from rich.table import Table

from hybrid_runtime import HybridRuntime, SamplingParams

INTERVALS = (1, 64, 256, None)
BATCHES = (1, 8)
PROMPT_LEN = 32
NUM_DECODED = 512
NUM_TURNS = 64
NUM_CHANGED = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    table = Table(
        "track_interval", *(f"ms per step, batch {batch}" for batch in BATCHES), "computed again: mean", "most"
    )
    console = Console()
    figures: dict[str, Any] = {}
    for interval in INTERVALS:
        name = "off" if interval is None else str(interval)
        milliseconds = {batch: _step_milliseconds(interval, batch, options.repeats) for batch in BATCHES}
        again = _recomputed_tokens(interval)
        mean, most = statistics.mean(again), max(again)
        table.add_row(name, *(f"{value:.2f}" for value in milliseconds.values()), f"{mean:.0f}", str(most))
        console.print(f"track_interval {name}: done")
        figures[name] = {
            "ms_per_step": {str(batch): value for batch, value in milliseconds.items()},
            "recomputed_tokens": {"mean": mean, "max": most},
        }
    console.print(table)
    write_results(options.out, figures)


def _runtime(interval: int | None) -> HybridRuntime:
    return HybridRuntime("tiny", track_interval=interval, max_num_seqs=max(BATCHES))


def _draw(rng: np.random.Generator, rt: HybridRuntime, length: int) -> list[int]:
    return rng.integers(3, rt.model.spec.vocab_size, size=length).tolist()


def _step_milliseconds(interval: int | None, batch: int, repeats: int) -> float:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=NUM_DECODED, temperature=0.0, ignore_eos=True)
    with _runtime(interval) as rt:

        def step_seconds() -> float:
            outputs = rt.generate([_draw(rng, rt, PROMPT_LEN) for _ in range(batch)], params)
            starts = [output.metrics.first_token_time or 0.0 for output in outputs]
            ends = [output.metrics.finished_time or 0.0 for output in outputs]
            return (max(ends) - max(starts)) / (NUM_DECODED - 1)

        return 1000 * median(step_seconds, repeats)


def _recomputed_tokens(interval: int | None) -> list[int]:
    """For each of many turns, the unchanged tokens that are computed again when the next one comes."""
    rng = np.random.default_rng(1)
    again: list[int] = []
    with _runtime(interval) as rt:
        for _ in range(NUM_TURNS):
            prompt = _draw(rng, rt, PROMPT_LEN)
            num_decoded = int(rng.integers(NUM_CHANGED, NUM_DECODED + 1))
            params = SamplingParams(max_tokens=num_decoded, temperature=0.0, ignore_eos=True)
            answer = rt.generate(prompt, params)[0].outputs[0].token_ids
            unchanged = [*prompt, *answer[:-NUM_CHANGED]]
            other = (answer[-NUM_CHANGED] + 1) % rt.model.spec.vocab_size
            [output] = rt.generate([*unchanged, other], max_tokens=1)
            again.append(len(unchanged) - output.num_cached_tokens)
    return again


if __name__ == "__main__":
    main()

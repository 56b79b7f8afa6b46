"""What is measured of every other engine, and how; `bench_engine.py` does the same for this one."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

GRANITE = Path(__file__).parents[1] / "models" / "granite-h-350m"
Generate = Callable[[Sequence[list[int]], int], object]  # prompts, tokens to generate for each, greedily


def parse_options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=GRANITE, help="folder with the config.json of a model")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048], help="tokens of each prefill")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--decode-prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64, help="steps of each decode")
    parser.add_argument("--shared", type=int, default=2048, help="tokens of a shared prefix")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def measure(engine: str, generate: Generate, vocab_size: int, options: argparse.Namespace, *, has_cache: bool) -> None:
    """Prints one JSON line per case: medians over runs with fresh random prompts, after one that is not counted.

    Decode time per step is the difference of a run of N + 1 tokens and a run of one token, over N. An engine with a
    prefix cache is also asked for prompts with one prefix; where it fails, the line says how.
    """
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    def seconds(prompts: Sequence[list[int]], num_tokens: int) -> float:
        start = time.perf_counter()
        generate(prompts, num_tokens)
        return time.perf_counter() - start

    def median(one: Callable[[], float]) -> float:
        one()
        return statistics.median(one() for _ in range(options.repeat))

    def step_seconds(batch: int) -> float:
        first, whole = (
            seconds([draw(options.decode_prompt) for _ in range(batch)], num_tokens)
            for num_tokens in (1, options.decode + 1)
        )
        return (whole - first) / options.decode

    def report(case: str, **figures: object) -> None:
        print(json.dumps({"engine": engine, "case": case, **figures}), flush=True)

    for length in options.prompt:
        report("prefill", tokens=length, tok_s=length / median(lambda length=length: seconds([draw(length)], 1)))
    for batch in options.batch:
        report("decode", batch=batch, ms_step=1e3 * median(lambda batch=batch: step_seconds(batch)))
    if has_cache:
        prefix = draw(options.shared)
        try:
            cold = seconds([prefix + draw(32)], 1)
            warm = median(lambda: seconds([prefix + draw(32)], 1))
        except Exception as error:  # whatever another engine dies of
            report("shared", prefix=options.shared, error=f"{type(error).__name__}: {error}"[:200])
        else:
            report("shared", prefix=options.shared, ttft_cold_s=cold, ttft_warm_s=warm)

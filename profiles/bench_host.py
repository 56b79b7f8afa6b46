"""Host time of a decode step: scheduling, preparing and applying it, with nothing for a model.

`python profiles/bench_host.py --out profiles/results/bench_host.json`. The forward is replaced by results that are
there at once, so that a step's time is all Python and NumPy. What a runner stages for the device is left out, and there
is no tokenizer (decoding the text of a token costs about 5 us more).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import write_results

from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.prepared import PreparedStep, SampledRows, prepare_step
from hybrid_runtime.engine.request_factory import RequestFactory
from hybrid_runtime.engine.request_group import Prompt
from hybrid_runtime.engine.results import ForwardResult, SampledToken
from hybrid_runtime.memory.plan import plan_memory
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.scheduling.scheduler import ScheduledStep, Scheduler

PROMPT_LEN = 200
NUM_STEPS = 400
MAX_LEN = PROMPT_LEN + NUM_STEPS + 20


class NothingRunner:
    """Prepares steps as the real runner does; its device answers at once, with always the same token."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory = memory

    def prepare(self, step: ScheduledStep) -> PreparedStep:
        return prepare_step(step, self._memory.table, copy_table=not self._memory.table_is_shared)

    def launch(self, prepared: PreparedStep) -> LaunchedNothing:
        forwards = [forward for forward in (prepared.prefill, prepared.decode) if forward is not None]
        return LaunchedNothing(
            [
                ForwardResult([SampledToken(r, 7, None) for r in each.sampled.requests], [], frozenset())
                for each in forwards
            ]
        )


def _answer(rows: SampledRows) -> ForwardResult:
    return ForwardResult([SampledToken(request, 7, None) for request in rows.requests], [], frozenset())


class LaunchedNothing:
    def __init__(self, results: list[ForwardResult]) -> None:
        self._results = results

    def wait(self) -> list[ForwardResult]:
        return self._results


def build(batch: int, *, overlaps: bool) -> Engine:
    """An engine with `batch` requests that all decode."""
    config = RuntimeConfig(
        num_kv_slots=batch * MAX_LEN, num_state_slots=8 * batch, max_num_seqs=batch, max_model_len=MAX_LEN
    )
    plan = plan_memory(config, (), (), model_max_len=MAX_LEN, available_bytes=1)
    memory = EngineMemory(
        plan,
        (),
        (),
        max_num_seqs=batch,
        eviction=config.eviction,
        device=torch.device("cpu"),
        table_is_shared=not overlaps,
    )
    policy = CheckpointPolicy(track_interval=config.track_interval, num_track_slots=2 if overlaps else 1)
    residency = Residency(memory.supply, memory.table, enabled=True, policy=policy)
    scheduler = Scheduler(residency, max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT_LEN)
    runner: Any = NothingRunner(memory)
    engine = Engine(scheduler, runner, memory, tokenizer=None, debug_checks=False, overlaps=overlaps)
    factory = RequestFactory(None, max_model_len=MAX_LEN, eos_token_ids=frozenset(), seed=0)
    rng = np.random.default_rng(0)
    for index in range(batch):
        prompt = tuple(rng.integers(0, 1000, PROMPT_LEN).tolist())
        engine.add(factory.new_group(str(index), Prompt(prompt, None), SamplingParams(max_tokens=NUM_STEPS + 10)))
    for _ in range(5):
        engine.step()
    engine.progressed.clear()
    return engine


def measure(batch: int, *, overlaps: bool) -> dict[str, float]:
    """Microseconds per step: the median of all steps, and of its phases in as many others."""
    engine = build(batch, overlaps=overlaps)
    totals = [_seconds(engine.step, engine) for _ in range(NUM_STEPS // 2)]
    phases: dict[str, list[float]] = defaultdict(list)
    with timed_phases(engine, phases):
        for _ in range(NUM_STEPS // 2 - 20):
            engine.step()
            engine.progressed.clear()
    figures = {"total": statistics.median(totals), "least": min(totals)}
    figures |= {name: statistics.median(times) for name, times in phases.items()}
    return {name: round(1e6 * seconds, 1) for name, seconds in figures.items()}


def _seconds(call: Callable[[], None], engine: Engine) -> float:
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    engine.progressed.clear()
    return seconds


@contextmanager
def timed_phases(engine: Engine, phases: dict[str, list[float]]) -> Any:
    """While it is open, notes how long each call of the phases takes."""
    targets: list[tuple[Any, str, str]] = [(engine.runner, "prepare", "prepare"), (engine, "_apply", "apply")]
    targets += [(engine.scheduler, name, "schedule") for name in ("schedule", "schedule_ahead")]
    for owner, name, phase in targets:
        plain = getattr(owner, name)

        def timed(*args: Any, plain: Any = plain, phase: str = phase) -> Any:
            start = time.perf_counter()
            result = plain(*args)
            phases[phase].append(time.perf_counter() - start)
            return result

        setattr(owner, name, timed)
    yield
    for owner, name, _ in targets:
        delattr(owner, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--out", type=Path, help="the JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    columns = ("total", "least", "schedule", "prepare", "apply")
    print("us per step: batch, overlap, " + ", ".join(columns))
    for batch in options.batches:
        for overlaps in (False, True):
            row = measure(batch, overlaps=overlaps)
            figures[f"b{batch}.{'overlap' if overlaps else 'alone'}"] = row
            print(f"{batch:>6} {overlaps!s:>8} " + " ".join(f"{row[name]:>8.1f}" for name in columns))
    write_results(options.out, figures)


if __name__ == "__main__":
    main()

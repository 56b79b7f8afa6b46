"""The prefix cache and the allocators alone: requests per second of one thread, on a trace drawn from a seed.

    python profiles/bench_cache.py [--repeats 5] [--policy lru] [--out profiles/results/bench_cache.json]

Each request matches, locks, takes slots (evicting where none are free), inserts and unlocks; no model runs. Medians
over the repeats of the thread's own processor time, each on a new cache. The time of comparing the same tokens once as
plain memory is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.scheduling.supply import SlotSupply

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class TraceShape:
    """Sequences of `min_len..max_len` tokens, those that continue no other one up to `max_first_len`."""

    num_requests: int = 2000
    min_len: int = 500
    max_len: int = 4000
    max_first_len: int = 3500
    max_added: int = 800
    root_len: int = 400
    num_roots: int = 32
    vocab_size: int = 50_000
    seed: int = 0


@dataclass(frozen=True)
class Setting:
    name: str
    num_kv_slots: int
    num_state_slots: int


@dataclass(frozen=True)
class Outcome:
    """What a run of the trace did; equal in every run of one trace, setting and policy."""

    num_hit_tokens: int
    num_evicted_tokens: int
    num_evicted_states: int


SETTINGS = (Setting("state pressure", 1_000_000, 400), Setting("no eviction", 4_000_000, 4_000))


def make_trace(shape: TraceShape) -> list[Tokens]:
    """Half of the sequences are an earlier one with new tokens behind it; the others are a root with new tokens.

    Roots are drawn by a Zipf law of exponent 1, earlier sequences evenly from those that leave room.
    """
    rng = np.random.default_rng(shape.seed)
    roots = [rng.integers(shape.vocab_size, size=shape.root_len, dtype=np.int32) for _ in range(shape.num_roots)]
    weights = 1 / np.arange(1, shape.num_roots + 1)
    trace: list[Tokens] = []
    for _ in range(shape.num_requests):
        extendable = [tokens for tokens in trace if len(tokens) < shape.max_len]
        if extendable and rng.random() < 0.5:
            start = extendable[rng.integers(len(extendable))]
            length = rng.integers(len(start), min(shape.max_len, len(start) + shape.max_added)) + 1
        else:
            start = roots[rng.choice(shape.num_roots, p=weights / weights.sum())]
            length = rng.integers(shape.min_len, shape.max_first_len + 1)
        added = rng.integers(shape.vocab_size, size=length - len(start), dtype=np.int32)
        trace.append(np.concatenate([start, added]))
    return trace


def make_supply(num_kv_slots: int, num_state_slots: int, policy: str) -> SlotSupply:
    return SlotSupply(SlotAllocator(num_kv_slots), SlotAllocator(num_state_slots), RadixCache(policy))


def serve(supply: SlotSupply, tokens: Tokens) -> int:
    """What one request asks of cache and allocators, from admission to its end. Returns the tokens it found."""
    cache = supply.cache
    match = cache.match(tokens)
    receipt = cache.lock(match.node)
    own = supply.take_kv(len(tokens) - match.state_length)
    tail, final = supply.take_states(2).tolist()
    receipt.release_state()
    checkpoints = [
        Checkpoint(len(tokens) - 1, StateSlot(tail), "tail"),
        Checkpoint(len(tokens), StateSlot(final), "final"),
    ]
    row = np.concatenate([match.kv_slots, own])
    result = cache.insert(tokens, row, checkpoints, protected_length=match.state_length)
    supply.release_kv(result.duplicate_kv_slots)
    supply.release_states(result.duplicate_state_slots)
    supply.release(cache.unlock(receipt))
    return match.state_length


def run(trace: list[Tokens], supply: SlotSupply) -> Outcome:
    num_hit_tokens = sum(serve(supply, tokens) for tokens in trace)
    return Outcome(num_hit_tokens, supply.num_evicted_tokens, supply.num_evicted_states)


def compare_as_memory(trace: list[Tokens], copies: list[bytes]) -> None:
    """Each sequence once against its own bytes: the least that any lookup of them must do."""
    for tokens, copy in zip(trace, copies, strict=True):
        assert tokens.tobytes() == copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", choices=("lru", "cost"), default="lru")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()

    trace = make_trace(TraceShape())
    lengths = [len(tokens) for tokens in trace]
    table = Table("setting", "requests/s", "us per request", "hit tokens", "evicted tokens", "evicted states")
    figures: dict[str, dict[str, float | str]] = {}
    for setting in SETTINGS:
        outcome, seconds = _measure(trace, setting, options.policy, options.repeats)
        rate = len(trace) / seconds
        table.add_row(
            setting.name, f"{rate:,.0f}", f"{1e6 / rate:.1f}", *(f"{count:,}" for count in asdict(outcome).values())
        )
        figures[setting.name] = {"median": rate, "unit": "requests/s", **asdict(outcome)}
    copies = [tokens.tobytes() for tokens in trace]
    seconds = _median_seconds(lambda: compare_as_memory(trace, copies), options.repeats)
    table.add_row("comparing the tokens as memory", f"{len(trace) / seconds:,.0f}", f"{1e6 * seconds / len(trace):.2f}")
    figures["comparing the tokens as memory"] = {"median": len(trace) / seconds, "unit": "requests/s"}

    console = Console()
    console.print(table)
    console.print(
        f"{len(trace):,} requests of {min(lengths):,} to {max(lengths):,} tokens, "
        f"mean {statistics.mean(lengths):,.0f}; policy {options.policy}, median of {options.repeats}; {_machine()}"
    )
    if options.out is not None:
        record = {
            "machine": _machine(),
            "commit": _commit(),
            "command": f"python profiles/bench_cache.py --repeats {options.repeats} --policy {options.policy}",
            "figures": figures,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


def _measure(trace: list[Tokens], setting: Setting, policy: str, repeats: int) -> tuple[Outcome, float]:
    outcomes: list[Outcome] = []

    def one_run() -> Callable[[], None]:
        supply = make_supply(setting.num_kv_slots, setting.num_state_slots, policy)
        return lambda: outcomes.append(run(trace, supply))

    seconds = statistics.median(_seconds(one_run()) for _ in range(repeats))
    assert len(set(outcomes)) == 1, "the same trace had different outcomes"
    return outcomes[0], seconds


def _median_seconds(call: Callable[[], None], repeats: int) -> float:
    return statistics.median(_seconds(call) for _ in range(repeats))


def _seconds(call: Callable[[], None]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def _machine() -> str:
    return f"{platform.machine()}, {_cpu_model()}, Python {platform.python_version()}, NumPy {np.__version__}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines: list[str] = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _commit() -> str | None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


if __name__ == "__main__":
    main()

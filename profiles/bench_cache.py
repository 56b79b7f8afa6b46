"""The prefix cache and the allocators alone: requests per second of one thread, on a trace drawn from a seed.

    python profiles/bench_cache.py [--repeats 5] [--policy lru] [--out profiles/results/bench_cache.json]

Each request matches, locks, takes slots (evicting where none are free), inserts and unlocks; no model runs. Medians
over the repeats, each on a new cache, of the thread's own processor time. The time of comparing the same tokens once as
plain memory stands beside it, to judge the figure on another machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cache_trace import Outcome, Tokens, TraceShape, make_supply, make_trace, run
from measuring import machine, median, write_results
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Setting:
    name: str
    num_kv_slots: int
    num_state_slots: int


SETTINGS = (Setting("state pressure", 1_000_000, 400), Setting("no eviction", 4_000_000, 4_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", choices=("lru", "cost"), default="lru")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()

    trace = make_trace(TraceShape())
    lengths = [len(tokens) for tokens in trace]
    table = Table("setting", "requests/s", "us per request", "hit tokens", "evicted tokens", "evicted states")
    figures = {}
    for setting in SETTINGS:
        outcome, seconds = measure(trace, setting, options.policy, options.repeats)
        counts = asdict(outcome)
        table.add_row(setting.name, *_rate(seconds, len(trace)), *(f"{count:,}" for count in counts.values()))
        figures[setting.name] = {"median": len(trace) / seconds, "unit": "requests/s", **counts}
    copies = [tokens.tobytes() for tokens in trace]
    seconds = median(lambda: _seconds(lambda: compare_as_memory(trace, copies)), options.repeats)
    table.add_row("comparing as memory", *_rate(seconds, len(trace)))
    figures["comparing as memory"] = {"median": len(trace) / seconds, "unit": "requests/s"}

    console = Console()
    console.print(table)
    console.print(
        f"{len(trace):,} requests of {min(lengths):,} to {max(lengths):,} tokens, "
        f"mean {sum(lengths) / len(trace):,.0f}; policy {options.policy}, median of {options.repeats}; {machine()}"
    )
    write_results(options.out, figures)


def measure(trace: list[Tokens], setting: Setting, policy: str, repeats: int) -> tuple[Outcome, float]:
    """What the trace does under a setting, and the median of the seconds that it takes."""
    outcomes: set[Outcome] = set()

    def one_run() -> float:
        supply = make_supply(setting.num_kv_slots, setting.num_state_slots, policy)
        return _seconds(lambda: outcomes.add(run(trace, supply)))

    seconds = median(one_run, repeats)
    [outcome] = outcomes
    return outcome, seconds


def compare_as_memory(trace: list[Tokens], copies: list[bytes]) -> None:
    """Each sequence once against its own bytes: the least that any lookup of them must do."""
    for tokens, copy in zip(trace, copies, strict=True):
        assert tokens.tobytes() == copy


def _rate(seconds: float, num_requests: int) -> tuple[str, str]:
    return f"{num_requests / seconds:,.0f}", f"{1e6 * seconds / num_requests:.1f}"


def _seconds(call: Callable[[], None]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


if __name__ == "__main__":
    main()

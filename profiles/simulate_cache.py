"""Token hit rates of eviction policies: a trace through the real prefix cache and allocators, without a model.

    python profiles/simulate_cache.py TRACE.jsonl [--policies lru cost] [--state-slots 256 1024]
    python profiles/simulate_cache.py --synthetic chat [--requests 6000] [--state-slots 64 256]
        [--plot profiles/results/simulate_cache] [--out profiles/results/simulate_cache.json]

TRACE is in Mooncake's format: one JSON object a line with `input_length` and `hash_ids`, the ids of its blocks of 512
tokens. An id stands for a block and all that precedes it.

Conventions: the requests run one after the other, in file order. Token t of block h is the pair (h, t); the last block
of a prompt may be a part. Outputs are not inserted. KV is unlimited unless `--kv-blocks` says how many blocks of it
there are; the two bounds always have all. State slots are taken by checkpoints only. A checkpoint is kept at the last
whole block boundary before the prompt's end (tail) and at the last block that the tree's keys match, if the state that
the request resumes from is above it (junction). The column "lru, checkpoint every 2,048" has one every 2,048 tokens and
at the tail instead. The rate is cached tokens over input tokens.

A block is represented by `--tokens-per-block` tokens instead of 512. The tree splits only at block boundaries, and
policies look at lengths only relative to each other (`cost` divides by no constant length), so that every number of
tokens gives the same decisions, as long as `cost` recognises evicted states at block boundaries: multiples of 64 do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cache_bounds import bound_without_eviction, clairvoyant
from cache_workloads import BLOCK_SIZE, SYNTHETIC, Request, read_trace, synthetic
from measuring import write_results
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import Checkpoint, PrefixMatch
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.scheduling.supply import SlotSupply

TOKENS_PER_BLOCK = 64
INTERVAL_BLOCKS = 2048 // BLOCK_SIZE
EVERY_2048 = "lru, checkpoint every 2,048"
WITHOUT_EVICTION = "lru, slots for all"

Placement = Callable[[int, int, int], dict[int, str]]
"""From the lengths of state, keys and tail, in blocks: the lengths of the checkpoints to keep, with their origins."""


@dataclass(frozen=True)
class Replay:
    """What a trace got from a cache, in tokens of the trace."""

    num_input_tokens: int
    num_cached_tokens: int
    num_evicted_states: int

    @property
    def rate(self) -> float:
        return self.num_cached_tokens / self.num_input_tokens


def tail_and_junction(state: int, keys: int, tail: int) -> dict[int, str]:
    places = {keys: "junction"} if state < keys < tail else {}
    return places | ({tail: "tail"} if state < tail else {})


def tail_and_interval(state: int, _keys: int, tail: int) -> dict[int, str]:
    first = state // INTERVAL_BLOCKS + 1
    places = dict.fromkeys(range(first * INTERVAL_BLOCKS, tail, INTERVAL_BLOCKS), "interval")
    return places | ({tail: "tail"} if state < tail else {})


class Simulation:
    """One cache, its allocators, and the requests it has seen."""

    def __init__(
        self, policy: str, num_kv_slots: int, num_state_slots: int, tokens_per_block: int, placement: Placement
    ) -> None:
        states = SlotAllocator(num_state_slots)
        self.supply = SlotSupply(SlotAllocator(num_kv_slots), states, RadixCache(policy))
        self._tokens_per_block = tokens_per_block
        self._placement = placement

    def serve(self, request: Request) -> int:
        """Looks up a prompt and keeps its checkpoints. Returns the number of cached tokens."""
        cache = self.supply.cache
        tokens = self._tokens(request)
        match = cache.match(tokens)
        receipt = cache.lock(match.node)
        receipt.release_state()
        state, keys = match.state_length // self._tokens_per_block, match.kv_length // self._tokens_per_block
        places = self._placement(state, keys, len(request.reusable))
        if places:
            self._insert(tokens, match, dict(list(places.items())[-self.supply.states.num_slots :]))
        self.supply.release(cache.unlock(receipt))
        return BLOCK_SIZE * state

    def _insert(self, tokens: NDArray[np.int32], match: PrefixMatch, places: dict[int, str]) -> None:
        end = max(places) * self._tokens_per_block
        if not self.supply.can_supply(end - match.state_length, len(places)):
            return
        kv_slots = np.concatenate([match.kv_slots, self.supply.take_kv(end - match.state_length)])
        slots = self.supply.take_states(len(places)).tolist()
        checkpoints = [
            Checkpoint(blocks * self._tokens_per_block, StateSlot(slot), origin)
            for (blocks, origin), slot in zip(places.items(), slots, strict=True)
        ]
        result = self.supply.cache.insert(tokens[:end], kv_slots, checkpoints, protected_length=match.state_length)
        self.supply.release_kv(result.duplicate_kv_slots)
        self.supply.release_states(result.duplicate_state_slots.tolist())

    def _tokens(self, request: Request) -> NDArray[np.int32]:
        """Token t of block h is `tokens_per_block * h + t`; of the last block there is the same part, rounded up."""
        size = self._tokens_per_block
        starts = size * np.array(request.blocks, dtype=np.int32)
        missing = (BLOCK_SIZE * len(request.blocks) - request.num_tokens) * size // BLOCK_SIZE
        tokens = np.add.outer(starts, np.arange(size, dtype=np.int32), dtype=np.int32)
        return tokens.ravel()[: size * len(request.blocks) - missing]


def replay(
    requests: Sequence[Request],
    policy: str,
    num_state_slots: int,
    *,
    placement: Placement = tail_and_junction,
    tokens_per_block: int = TOKENS_PER_BLOCK,
    num_kv_blocks: int | None = None,
) -> Replay:
    """Runs a trace through a new cache with that many state slots, and KV slots for that many blocks or for all."""
    if num_kv_blocks is None:
        num_blocks = len({block for request in requests for block in request.blocks})
        num_kv_blocks = num_blocks + max(len(request.blocks) for request in requests)
    num_kv_slots = tokens_per_block * num_kv_blocks
    simulation = Simulation(policy, num_kv_slots, num_state_slots, tokens_per_block, placement)
    num_cached = sum(simulation.serve(request) for request in requests)
    num_input = sum(request.num_tokens for request in requests)
    return Replay(num_input, num_cached, simulation.supply.num_evicted_states)


def hit_rates(
    requests: Sequence[Request],
    policies: Sequence[str],
    state_slots: Sequence[int],
    tokens_per_block: int = TOKENS_PER_BLOCK,
    num_kv_blocks: int | None = None,
) -> dict[str, dict[int, float]]:
    """Rates by column and number of state slots."""

    def rate(policy: str, num_state_slots: int, placement: Placement = tail_and_junction) -> float:
        return replay(
            requests,
            policy,
            num_state_slots,
            placement=placement,
            tokens_per_block=tokens_per_block,
            num_kv_blocks=num_kv_blocks,
        ).rate

    def column(policy: str, placement: Placement = tail_and_junction) -> dict[int, float]:
        return {slots: rate(policy, slots, placement) for slots in state_slots}

    unlimited = rate("lru", 2 * len(requests))
    return {
        EVERY_2048: column("lru", tail_and_interval),
        **{policy: column(policy) for policy in policies},
        "clairvoyant": {slots: clairvoyant(requests, slots) for slots in state_slots},
        WITHOUT_EVICTION: dict.fromkeys(state_slots, unlimited),
        "bound": dict.fromkeys(state_slots, bound_without_eviction(requests)),
    }


def print_table(rates: dict[str, dict[int, float]], state_slots: Sequence[int], title: str) -> None:
    table = Table("state slots", *rates, title=title)
    for slots in state_slots:
        table.add_row(f"{slots:,}", *(f"{100 * column[slots]:.1f} %" for column in rates.values()))
    Console(width=110).print(table)


def plot(rates: dict[str, dict[int, float]], title: str, path: Path) -> None:
    """Draws hit rate over state slots to `path` with the suffixes .png and .svg."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hit rates"  # the same figure is the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, column in rates.items():
        flat = name in (WITHOUT_EVICTION, "bound")
        axes.plot(list(column), [100 * rate for rate in column.values()], "--" if flat else "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(next(iter(rates.values()))), [f"{slots:,}" for slots in next(iter(rates.values()))])
    axes.minorticks_off()
    axes.set(xlabel="state slots", ylabel="cached tokens, % of input", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("trace", type=Path, nargs="?")
    source.add_argument("--synthetic", choices=sorted(SYNTHETIC))
    parser.add_argument("--requests", type=int, help="only the first of them (of a synthetic one, how many: 6000)")
    parser.add_argument("--policies", nargs="*", default=["lru", "cost"])
    parser.add_argument("--state-slots", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--kv-blocks", type=int, help="blocks of 512 tokens that the KV pool holds; default all")
    parser.add_argument("--tokens-per-block", type=int, default=TOKENS_PER_BLOCK)
    parser.add_argument("--plot", type=Path, help="draw the rates to this path, as .png and .svg")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)

    if options.synthetic is not None:
        title, requests = options.synthetic, synthetic(options.synthetic, options.requests or 6000)
    else:
        title, requests = options.trace.stem, read_trace(options.trace)[: options.requests]
    state_slots = sorted(options.state_slots)
    rates = hit_rates(requests, options.policies, state_slots, options.tokens_per_block, options.kv_blocks)
    print_table(rates, state_slots, f"{title}: cached tokens of {len(requests):,} requests")
    if options.plot is not None:
        plot(rates, title, options.plot)
    write_results(options.out, {"trace": title, "num_requests": len(requests), "rates": rates})


if __name__ == "__main__":
    main()

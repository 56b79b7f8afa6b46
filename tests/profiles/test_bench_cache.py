"""The benchmark's trace is what it says, and the cache does with it what models without a tree do."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from hybrid_runtime.cache.node import Node
from hybrid_runtime.cache.radix_cache import RadixCache
from profiles.cache_trace import TraceShape, make_supply, make_trace, run, serve
from tests.cache.helpers import checkpoint, kv_contents, state_contents
from tests.cache.naive_cache import NaiveCache
from tests.profiles.scan_model import ScanModel

SMALL = TraceShape(
    num_requests=200, min_len=12, max_len=100, max_first_len=87, max_added=20, root_len=10, num_roots=8, vocab_size=9
)


@pytest.fixture(scope="module")
def trace():
    return make_trace(TraceShape())


def test_the_trace_is_what_the_benchmark_says(trace):
    lengths = np.array([len(tokens) for tokens in trace])
    assert len(trace) == 2000
    assert 500 <= lengths.min() < 520
    assert 3980 < lengths.max() <= 4000
    assert abs(lengths.mean() - 2375) < 50
    again, other = make_trace(TraceShape(num_requests=20)), make_trace(TraceShape(num_requests=20, seed=1))
    assert all(np.array_equal(a, b) for a, b in zip(trace, again, strict=False))
    assert not any(np.array_equal(a, b) for a, b in zip(other, again, strict=True))
    earlier = {tokens.tobytes() for tokens in trace}
    continued = sum(any(tokens[:n].tobytes() in earlier for n in range(1, len(tokens))) for tokens in trace[::20])
    assert 35 <= continued <= 65
    roots = {tokens[:400].tobytes(): 0 for tokens in trace}
    assert len(roots) == 32


@pytest.mark.parametrize(
    ("num_kv_slots", "num_state_slots"),
    [(1_000_000, 400), (4_000_000, 4_000)],
    ids=["state pressure", "no eviction"],
)
def test_at_full_size_the_cache_does_what_the_table_of_states_says(trace, num_kv_slots, num_state_slots):
    model = ScanModel(trace, num_kv_slots, num_state_slots)
    supply = make_supply(num_kv_slots, num_state_slots, "lru")
    assert run(trace, supply) == model.run()
    cache = supply.cache
    cache.check()
    in_tree = {tokens: origin for tokens, (_, origin) in states_by_tokens(cache).items()}
    assert in_tree == {trace[i][:length].tobytes(): origin for i, length, origin in model.states}
    assert cache.num_kv_slots == model.num_kv
    assert cache.num_protected_kv == cache.num_protected_states == 0
    assert supply.kv.num_free + cache.num_kv_slots == num_kv_slots
    assert supply.states.num_free + cache.num_state_slots == num_state_slots


class NaivePools:
    """`NaiveCache` behind two pools of which only the numbers of free slots are kept. Slots are never used again."""

    def __init__(self, num_kv_slots: int, num_state_slots: int) -> None:
        self.cache = NaiveCache()
        self.num_kv_slots = num_kv_slots
        self.num_state_slots = num_state_slots
        self.next_slot = itertools.count(1)
        self.num_evicted = [0, 0]

    def serve(self, tokens: tuple[int, ...]) -> int:
        cache = self.cache
        prefix, _ = cache.match(tokens)
        lock = cache.lock(prefix, with_state=True)
        num_own = len(tokens) - len(prefix)
        self.count(cache.evict_kv(len(cache.kv) + num_own - self.num_kv_slots))
        self.count(cache.evict_state(len(cache.states) + 2 - self.num_state_slots))
        cache.release_state(lock)
        row = [cache.kv[tokens[:n]] for n in range(1, len(prefix) + 1)]
        row += [next(self.next_slot) for _ in range(num_own)]
        checkpoints = [
            checkpoint(len(tokens) - 1, next(self.next_slot), "tail"),
            checkpoint(len(tokens), next(self.next_slot), "final"),
        ]
        cache.insert(tokens, row, checkpoints, len(prefix))
        assert cache.unlock(lock) == ([], [])
        return len(prefix)

    def count(self, freed: tuple[list[int], list[int]]) -> None:
        for pool in (0, 1):
            self.num_evicted[pool] += len(freed[pool])


@pytest.mark.parametrize(("num_kv_slots", "num_state_slots"), [(700, 40), (2500, 25), (100_000, 400)])
def test_at_small_size_the_cache_does_what_the_dictionaries_say(num_kv_slots, num_state_slots):
    supply = make_supply(num_kv_slots, num_state_slots, "lru")
    naive = NaivePools(num_kv_slots, num_state_slots)
    for tokens in make_trace(SMALL):
        assert serve(supply, tokens) == naive.serve(tuple(tokens.tolist()))
        assert [supply.num_evicted_tokens, supply.num_evicted_states] == naive.num_evicted
        assert supply.cache.num_kv_slots == len(naive.cache.kv)
        assert supply.cache.num_state_slots == len(naive.cache.states)
    supply.cache.check()
    assert kv_contents(supply.cache).keys() == naive.cache.kv.keys()
    origins = {prefix: origin for prefix, (_, origin) in naive.cache.states.items()}
    assert {prefix: origin for prefix, (_, origin) in state_contents(supply.cache).items()} == origins


class ScanHeap:
    """In place of the heap behind the orders of `cost`: looks through all members each time."""

    def __init__(self) -> None:
        self.places: dict[Node, tuple[float, int]] = {}
        self.num_set = 0

    def set(self, node: Node, priority: float) -> None:
        self.num_set += 1
        self.places[node] = priority, self.num_set

    def discard(self, node: Node) -> None:
        self.places.pop(node, None)

    def priority(self, node: Node) -> float:
        return self.places[node][0]

    def first(self) -> Node | None:
        return min(self.places, key=self.places.__getitem__, default=None)

    def __contains__(self, node: Node) -> bool:
        return node in self.places

    def __iter__(self):
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@pytest.mark.parametrize(
    ("shape", "num_kv_slots", "num_state_slots"),
    [(SMALL, 700, 40), (SMALL, 2500, 25), (TraceShape(), 1_000_000, 400)],
    ids=["small, KV pressure", "small, state pressure", "state pressure"],
)
def test_under_cost_the_victim_is_what_a_scan_finds(monkeypatch, shape, num_kv_slots, num_state_slots):
    trace = make_trace(shape)
    supply = make_supply(num_kv_slots, num_state_slots, "cost")
    outcome = run(trace, supply)
    monkeypatch.setattr("hybrid_runtime.cache.cost.LazyHeap", ScanHeap)
    scanned = make_supply(num_kv_slots, num_state_slots, "cost")
    assert run(trace, scanned) == outcome
    assert outcome.num_evicted_states > 100
    assert states_by_tokens(scanned.cache) == states_by_tokens(supply.cache)
    supply.cache.check()


def states_by_tokens(cache: RadixCache) -> dict[bytes, tuple[int | None, str | None]]:
    """State slot and origin by the tokens that lead there."""
    nodes = [node for node in cache.nodes() if node.state_slot is not None]
    return {cache.path_tokens(node).tobytes(): (node.state_slot, node.origin) for node in nodes}


@pytest.fixture
def bench_cache(monkeypatch):
    """The command's module, as when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    return importlib.import_module("bench_cache")


def test_the_command_prints_and_writes_what_it_measured(bench_cache, tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures" / "bench_cache.json"
    monkeypatch.setattr(bench_cache, "make_trace", lambda shape: make_trace(SMALL))
    monkeypatch.setattr("sys.argv", ["bench_cache.py", "--repeats", "2", "--out", str(out)])
    bench_cache.main()
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["command"].startswith("python profiles/bench_cache.py --repeats 2 ")
    assert record["figures"].keys() == {"state pressure", "no eviction", "comparing as memory"}
    for setting in bench_cache.SETTINGS:
        outcome = run(make_trace(SMALL), make_supply(setting.num_kv_slots, setting.num_state_slots, "lru"))
        figures = record["figures"][setting.name]
        assert figures["num_hit_tokens"] == outcome.num_hit_tokens > 0
        assert figures["median"] > 0
        assert f"{outcome.num_hit_tokens:,}" in printed

"""The trace simulator against simulations without a tree, and its table, files and workloads."""

from __future__ import annotations

import importlib
import json
import random
import sys
from itertools import count
from pathlib import Path

import pytest

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.fixture(scope="module", autouse=True)
def _beside_its_helpers():
    """The scripts import their helpers as modules beside them."""
    sys.path.insert(0, str(PROFILES))
    yield
    sys.path.remove(str(PROFILES))


@pytest.fixture(scope="module")
def sim(_beside_its_helpers):
    return importlib.import_module("simulate_cache")


@pytest.fixture(scope="module")
def workloads(_beside_its_helpers):
    return importlib.import_module("cache_workloads")


@pytest.fixture(scope="module")
def bounds(_beside_its_helpers):
    return importlib.import_module("cache_bounds")


def write_trace(path, num_requests, seed):
    """Conversations that grow, fork, repeat and share a first block; some lengths fall on a block's border."""
    rng, ids = random.Random(seed), count(10)
    chains: list[list[int]] = []
    with path.open("w") as file:
        for place in range(num_requests):
            if chains and rng.random() < 0.6:
                chain = rng.choice(chains[-20:])
                chain = chain[: rng.randint(1, len(chain))] if rng.random() < 0.3 else chain
            else:
                chain = [0]
            blocks = chain + [next(ids) for _ in range(rng.randint(0, 4))]
            chains.append(blocks)
            length = 512 * len(blocks) - rng.choice([0, 0, 511, rng.randint(1, 510)])
            entry = {"timestamp": place, "input_length": length, "output_length": 1, "hash_ids": blocks}
            file.write(json.dumps(entry) + "\n")
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "small.jsonl", 300, seed=0)


@pytest.fixture(scope="module")
def requests(trace, workloads):
    return workloads.read_trace(trace)


def lru_by_prefixes(requests, num_states, every=None):
    """Cached tokens under LRU. States are prefixes of blocks, the oldest use first; the keys are all their prefixes."""
    states: list[tuple[int, ...]] = []
    num_cached = 0
    for request in requests:
        prompt = request.blocks[: (request.num_tokens - 1) // 512]
        prefixes = [prompt[:n] for n in range(1, len(prompt) + 1)]
        hit = max((each for each in prefixes if each in states), key=len, default=())
        keys = max(
            (each for each in prefixes if any(state[: len(each)] == each for state in states)), key=len, default=()
        )
        num_cached += 512 * len(hit)
        if hit:
            states.remove(hit)
            states.append(hit)
        if every is None:
            new = [keys, prompt] if len(hit) < len(keys) < len(prompt) else [prompt]
        else:
            new = [each for each in prefixes if len(each) % every == 0 and len(each) > len(hit)] + [prompt]
        new = [each for each in dict.fromkeys(new) if len(each) > len(hit)][-num_states:]
        states = states[max(0, len(states) + len(new) - num_states) :] + new
    return num_cached


@pytest.mark.parametrize("num_states", [2, 5, 20, 60, 1000])
def test_lru_is_what_lists_of_prefixes_give(sim, requests, num_states):
    assert sim.replay(requests, "lru", num_states).num_cached_tokens == lru_by_prefixes(requests, num_states)
    interval = sim.replay(requests, "lru", num_states, placement=sim.tail_and_interval).num_cached_tokens
    assert interval == lru_by_prefixes(requests, num_states, every=4)


def test_the_rate_is_cached_tokens_over_input_tokens(sim, requests):
    replay = sim.replay(requests, "lru", 20)
    assert replay.num_input_tokens == sum(request.num_tokens for request in requests)
    assert replay.rate == replay.num_cached_tokens / replay.num_input_tokens
    assert 0.1 < replay.rate < 0.9
    assert replay.num_evicted_states > 100


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize(("num_states", "num_kv_blocks"), [(5, None), (20, None), (1000, 30)])
def test_the_size_of_a_block_changes_no_decision(sim, requests, policy, num_states, num_kv_blocks):
    sizes = (64, 128, 512) if policy == "cost" else (1, 64, 512)
    first, *others = (
        sim.replay(requests[:200], policy, num_states, tokens_per_block=size, num_kv_blocks=num_kv_blocks)
        for size in sizes
    )
    assert others == [first, first]
    assert first.num_evicted_states > 50


def test_the_bound_is_what_all_earlier_prompts_share(bounds, requests):
    prompts = [request.blocks[: (request.num_tokens - 1) // 512] for request in requests]
    shared = 0
    for place, prompt in enumerate(prompts):
        shared += max((_num_common(prompt, other) for other in prompts[:place]), default=0)
    assert bounds.bound_without_eviction(requests) == 512 * shared / sum(request.num_tokens for request in requests)


def _num_common(first, second):
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_the_clairvoyant_keeps_what_saves_most_per_wait(bounds, workloads):
    def prompt(*blocks):
        return workloads.Request(512 * len(blocks) + 1, (*blocks, 99))

    long, short, other = (1, 2, 3, 4), (5, 6, 8), (7,)
    requests = [prompt(*long), prompt(*short), prompt(*other), prompt(*short), prompt(*other), prompt(*long)]
    total = sum(request.num_tokens for request in requests)
    assert bounds.clairvoyant(requests, 3) == 512 * 8 / total
    assert bounds.clairvoyant(requests, 2) == 512 * 7 / total
    assert bounds.clairvoyant(requests, 1) == 512 * 3 / total  # three blocks in two requests' time, not four in four
    assert bounds.clairvoyant(requests, 0) == 0


@pytest.mark.parametrize("num_states", [3, 10, 40])
def test_no_policy_passes_the_bounds(sim, bounds, requests, num_states):
    known = bounds.clairvoyant(requests, num_states)
    rates = [sim.replay(requests, policy, num_states).rate for policy in ("lru", "cost")]
    assert max(rates) < known <= bounds.bound_without_eviction(requests)
    assert bounds.clairvoyant(requests, 1000) == bounds.bound_without_eviction(requests)


@pytest.mark.parametrize("name", ["chat", "shared_prompts", "agents", "scan", "documents", "repeats"])
def test_cost_is_not_worse_than_lru(sim, workloads, name):
    requests = workloads.synthetic(name, 400)
    assert requests == workloads.synthetic(name, 400) != workloads.synthetic(name, 400, seed=1)
    for num_states in (16, 64):
        lru, cost = (sim.replay(requests, policy, num_states).rate for policy in ("lru", "cost"))
        assert cost > lru - 0.01
    lru, cost = (sim.replay(requests, policy, 800, num_kv_blocks=400).rate for policy in ("lru", "cost"))
    assert cost > lru - 0.01


def test_the_command_prints_the_table_and_writes_figures_and_plot(sim, trace, requests, tmp_path, capsys):
    out, picture = tmp_path / "new" / "figures.json", tmp_path / "new" / "rates"
    arguments = [str(trace), "--state-slots", "20", "5", "--policies", "lru", "cost", "--requests", "200"]
    sim.main([*arguments, "--out", str(out), "--plot", str(picture)])
    printed = capsys.readouterr().out
    rates = json.loads(out.read_text())["figures"]["rates"]
    assert list(rates) == [sim.EVERY_2048, "lru", "cost", "clairvoyant", sim.WITHOUT_EVICTION, "bound"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "%" in line]
    assert rows == [[slots, *(f"{100 * column[slots]:.1f} %" for column in rates.values())] for slots in ("5", "20")]
    total = sum(request.num_tokens for request in requests[:200])
    assert rates["lru"] == {str(slots): lru_by_prefixes(requests[:200], slots) / total for slots in (5, 20)}
    assert rates[sim.WITHOUT_EVICTION]["5"] == lru_by_prefixes(requests[:200], 1000) / total
    assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    svg = picture.with_suffix(".svg").read_text()
    assert "<svg" in svg
    assert all(f"<!-- {name} -->" in svg for name in rates)


def test_the_command_draws_synthetic_workloads(sim, capsys):
    sim.main(["--synthetic", "chat", "--requests", "50", "--state-slots", "4", "--policies", "cost"])
    assert "chat: cached tokens of 50 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"hash_ids": [1]}',
        '{"input_length": 513, "hash_ids": [1]}',
        '{"input_length": 0, "hash_ids": []}',
        '{"input_length": 512, "hash_ids": [1, 2]}',
    ],
)
def test_a_line_that_is_no_request_is_named(workloads, tmp_path, line):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"input_length": 1, "hash_ids": [7]}\n' + line)
    with pytest.raises(ValueError, match=r"line 2 of broken\.jsonl"):
        workloads.read_trace(path)

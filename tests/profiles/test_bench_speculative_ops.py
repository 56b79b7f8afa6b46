"""The benchmark of rollbacks measures ways that end in the same states, and prints and writes what it measures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.fixture(scope="module")
def bench():
    """The scripts import their helpers as modules beside them."""
    sys.path.insert(0, str(PROFILES))
    yield importlib.import_module("bench_speculative_ops")
    sys.path.remove(str(PROFILES))


@pytest.mark.parametrize("op", ["kda", "gdn", "mamba2"])
@pytest.mark.parametrize("tree", ["63 of topk 4", "chain of 7"])
def test_all_rollbacks_commit_the_same_states(bench, op: str, tree: str) -> None:
    """Else the times of one would be those of something else."""
    case = bench.Case(op, tree, bench.TREES[tree], 3, bench.SMALL_SIZES[op], 0)
    start = case.pools[0].clone()
    ends = {}
    for rollback in case.ROLLBACKS:
        case.pools[0].copy_(start)
        verify, commit = next(case.calls(rollback))
        commit(verify())
        ends[rollback] = case.pools[0].clone()
    assert not torch.equal(ends["fold"][1:], start[1:])
    for rollback in ("snapshot", "replay"):
        torch.testing.assert_close(ends[rollback], ends["fold"], rtol=1e-5, atol=1e-5)


def test_a_tree_of_63_needs_five_steps_at_topk_4(bench) -> None:
    parents = bench.TREES["63 of topk 4"]
    assert len(parents) == 63
    children = [parents[1:].count(node) for node in range(63)]
    assert set(children) == {0, 2, 4}  # the last node that is expanded lacks some
    assert int(bench.deepest_path(parents, 1).num_nodes_B) == 6
    with pytest.raises(ValueError, match="4 steps of topk 4 give 53 nodes, not 63"):
        bench.topk_tree(63, topk=4, num_steps=4)


def test_the_command_prints_and_writes_its_rows(bench, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", f"bench_speculative_ops.py --quick --threads 1 --rounds 1 --out {out}".split())
    bench.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    figures = json.loads(out.read_text())["figures"]
    assert figures["rows"] == rows
    assert len(rows) == 3 * 2 * 2 * 3  # ops, trees, rows, rollbacks
    assert all(row["verify_us"] > 0 and row["commit_us"] > 0 for row in rows)
    by_rollback = {row["rollback"]: row for row in rows[:3]}
    states = 2 * 16 * 16 * 4  # chain of 3, one row
    assert [by_rollback[name]["verify_state_bytes"] / states for name in ("fold", "snapshot", "replay")] == [1, 4, 4]
    assert [by_rollback[name]["commit_state_bytes"] / states for name in ("fold", "snapshot", "replay")] == [2, 2, 6]
    assert len(figures["fold_against_snapshot"]) == len(rows) / 3

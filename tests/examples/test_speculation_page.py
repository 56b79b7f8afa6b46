"""What the pages on speculation print beside pools: draft trees with their verdicts, states that lag, timings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_runtime.walkthrough import show, show_step
from hybrid_runtime.walkthrough.rollback_measured import MEMORY, TIMINGS, print_memory, print_timings
from tests.examples.speculation_parts import (
    PARENTS,
    RIGHT_PATH,
    Rounds,
    ScriptedDrafter,
    speculative_runtime,
    start,
    truth_of,
)

TREE = [
    "request R, 9 tokens computed: 10 nodes, 3 accepted",
    "  node  parent  KV slot            token",
    "  0     -       10       accepted  [{0}]",
    "  1     0       11                   [",
    "  4     1       14                     [",
    "  5     1       15                     [",
    "  6     1       16                     [",
    "  2     0       12       accepted    [{1}]",
    "  7     2       17                     [",
    "  8     2       18       accepted      [{2}]",
    "  9     2       19                     [",
    "  3     0       13                   [",
    "  behind node 8 the model says [{3}]: the next root",
]


def test_a_tree_is_drawn_with_its_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    truth = truth_of(9, 24)
    with speculative_runtime("fold", ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        start(rt, truth, 9)
        [output] = show_step(rt)
        assert output.outputs[0].token_ids == truth[9:13]
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(TREE)
        for line, expected in zip(lines, TREE, strict=True):
            assert line.startswith(expected.format(*truth[9:13]))
        while rt.has_unfinished:
            show_step(rt)
        assert capsys.readouterr().out.endswith("the next root\nno draft was verified\n"), "one token is left"


def test_a_state_that_lags_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    truth = truth_of(9, 24)
    with speculative_runtime("replay", ScriptedDrafter(truth, PARENTS, RIGHT_PATH), track_interval=11) as rt:
        rounds = Rounds(rt)
        start(rt, truth, 9)
        rt.step()
        slots = [rounds.request.resident.working_slot, rounds.request.resident.track_slots[0]]
        show(rt)
        shown = capsys.readouterr().out
        assert f"working slot  {slots[0]}, the state after 9 tokens; 3 more to be replayed\n" in shown
        assert f"track slot    {slots[1]}, the state after 11 tokens; to be replayed\n" in shown
        assert " 9 10 12 18\n" in shown, "the slots of rejected nodes are free"
        rt._engine.runner.commits.catch_up()
        show(rt)
        shown = capsys.readouterr().out
        assert f"working slot  {slots[0]}, the state after 12 tokens\n" in shown
        assert f"track slot    {slots[1]}, the state after 11 tokens\n" in shown


def write_record(path: Path, **figures: Any) -> None:
    record = {"machine": "a machine", "commit": "abc", "command": "python bench", "figures": figures}
    path.write_text(json.dumps(record), encoding="utf-8")


def test_timings_are_read_from_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_timings(tmp_path)
    assert capsys.readouterr().out == "bench_speculative_ops.json is not there: nothing was measured.\n"
    case = {"op": "kda", "tree": "chain of 3", "rows": 8, "accepted": 3}
    rows = [
        {**case, "rollback": "fold", "verify_us": 300.0, "commit_us": 100.0},
        {**case, "rollback": "replay", "verify_us": 1000.0, "commit_us": 1000.0},
    ]
    write_record(tmp_path / TIMINGS, rows=rows)
    print_timings(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "layer   tree          rows accepted  rollback    verify    commit  share",
        "kda     chain of 3       8        3  fold        300 us    100 us    25%",
        "                                     replay    1,000 us  1,000 us    50%",
        "",
        "a machine, commit abc",
        "python bench",
    ]


def test_memory_is_read_from_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_memory(tmp_path)
    assert capsys.readouterr().out == "bench_speculative_memory.json is not there: nothing was measured.\n"
    sizes = {"resident_planned": 8.99e9, "resident_extrapolated": 9.001e9, "peak_extrapolated": 12.3e9}
    row = {"layer": "KDA, Kimi-Linear", "rollback": "replay", **sizes}
    write_record(tmp_path / MEMORY, rows=[row], num_nodes=63, num_rows=8)
    print_memory(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "                     63 nodes   planned  resident      peak",
        "KDA, Kimi-Linear     replay     8.99 GB   9.00 GB  12.30 GB",
        "",
        "a machine, commit abc",
        "python bench",
    ]

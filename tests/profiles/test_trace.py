"""The engine's phases show in a trace under their names, nested as they run, and cost nothing otherwise."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "profiles" / "trace.py"
OPTIONS = "--compile off --device cpu --batch 4 --prefix 48 --warmup-steps 30 --steps 30"
PHASES = ("schedule", "prepare", "load", "copy", "run.prefill", "apply", "cache.match", "cache.insert", "cache.evict")


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Complete events of a trace of the bundled model."""
    out = tmp_path_factory.mktemp("trace") / "deep" / "trace.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        patch.setattr("sys.argv", [SCRIPT.name, *OPTIONS.split(), "--out", str(out)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return [event for event in json.loads(out.read_text())["traceEvents"] if event.get("ph") == "X"]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_every_phase_is_there(events: list[dict[str, Any]]) -> None:
    for name in PHASES:
        assert named(events, name), name
    decodes = [event["name"] for event in events if event["name"].startswith("run.decode")]
    assert all(re.fullmatch(r"run\.decode\.b[1-4]", name) for name in decodes)
    assert len(set(decodes)) > 1


@pytest.mark.parametrize(("inner", "outer"), [("cache.match", "schedule"), ("run.prefill", "step"), ("apply", "step")])
def test_phases_are_nested_as_they_run(events: list[dict[str, Any]], inner: str, outer: str) -> None:
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in named(events, outer)]
    assert len(spans) > 3
    for event in named(events, inner):
        assert any(start <= event["ts"] and event["ts"] + event["dur"] <= end for start, end in spans)

"""A pytest plugin that writes down what a long run of the property tests did: `pytest -p tests.long_run`.

The file has the commit, the seed, the profile, and for each test how many examples passed and how long they took.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import settings

_PASSING = re.compile(r"(\d+) passing")
_STOPPED = re.compile(r"Stopped because (.*)")
_STATISTICS = "_hypothesis_stats"  # what Hypothesis' plugin leaves on a report for its own summary


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-results", type=Path, help="the JSON file that the results go to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--long-results")
    if path is None:
        raise pytest.UsageError("--long-results names the file that the results go to")
    config.pluginmanager.register(_Recorder(path, config.getoption("--hypothesis-seed")))


class _Recorder:
    def __init__(self, path: Path, seed: str | None) -> None:
        self._path = path
        self._seed = seed
        self._started = datetime.now(UTC)
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self._tests.setdefault(report.nodeid, {"outcome": "passed", "num_examples": 0, "seconds": 0.0})
        entry["seconds"] = round(entry["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
        statistics = report.__dict__.get(_STATISTICS)
        if statistics is not None:
            entry["num_examples"] = sum(map(int, _PASSING.findall(statistics)))
            stopped = _STOPPED.search(statistics)
            entry["stopped"] = stopped.group(1) if stopped else None

    def pytest_sessionfinish(self) -> None:
        profile = settings.get_current_profile_name()
        outcomes = [entry["outcome"] for entry in self._tests.values()]
        result = {
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(UTC) - self._started).total_seconds()),
            "commit": _git("rev-parse", "HEAD"),
            "has_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
            "seed": self._seed,
            "profile": profile,
            "max_examples": settings.get_profile(profile).max_examples,
            "stateful_step_count": settings.get_profile(profile).stateful_step_count,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "hypothesis": hypothesis.__version__,
            "num_tests": len(outcomes),
            "num_failed": sum(outcome != "passed" for outcome in outcomes),
            "num_examples": sum(entry["num_examples"] for entry in self._tests.values()),
            "tests": dict(sorted(self._tests.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1) + "\n")


def _git(*arguments: str) -> str | None:
    """What git says; None outside a repository."""
    run = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None

"""A pytest plugin for runs that only ask which tests fail: `pytest -p tests.faults.plugin --failures FILE`.

The file gets a JSON object: for each test that failed, at which stage ("setup", "call", "teardown") and with what
message. Under the profile `PROFILE` Hypothesis spends no time on a small example.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

PROFILE = "no_shrinking"

settings.register_profile(
    PROFILE,
    max_examples=50,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="the JSON file for the tests that fail")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    if path is None:
        raise pytest.UsageError("--failures names the file for the tests that fail")
    config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = report.longreprtext if crash is None else crash.message
            self._failures.setdefault(report.nodeid, (report.when, message))

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._failures))

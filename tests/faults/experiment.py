"""Runs tests in a copy of the sources, with a fault planted there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.plugin import PROFILE

ROOT = Path(__file__).parents[2]
TIMEOUT = 120  # seconds for the tests of one fault
ALL_PASSED, SOME_FAILED = 0, 1  # exit statuses of pytest; others mean that tests could not be run
BROKEN = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
"""What a test of a fault must not fail with: that is a mistake in the table."""


@dataclass(frozen=True)
class TestRun:
    """How pytest ended, the failed tests' messages by node id, and the end of what it printed."""

    status: int | None  # None: it did not end in time
    failures: dict[str, str]
    output: str


def run_tests(fault: Fault | None, tests: Sequence[str], *, timeout: int = TIMEOUT) -> TestRun:
    """Runs tests with a fault; None: in an unchanged copy. Raises ValueError if the fault cannot be planted."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy, failures = Path(folder, "copy"), Path(folder, "failures.json")
        copy_sources(copy)
        if fault is not None:
            fault.plant(copy)
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.faults.plugin", f"--failures={failures}"]
        environment = {"HYPOTHESIS_PROFILE": PROFILE, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=copy,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TestRun(None, {}, f"no end after {timeout} s")
        found = json.loads(failures.read_text()) if failures.exists() else {}
    messages = {test: message for test, (when, message) in found.items() if when == "call"}
    return TestRun(done.returncode, messages, "\n".join((done.stdout + done.stderr).splitlines()[-30:]))


def why_missed(fault: Fault, run: TestRun) -> str | None:
    """None if each test that the fault names failed, and not by a mistake of the table; else what happened instead."""
    if run.status != SOME_FAILED:
        return run.output
    for test in fault.tests:
        messages = [message for name, message in run.failures.items() if _is_of(name, test)]
        if not messages:
            return f"{test} passes"
        if any(message.startswith(BROKEN) for message in messages):
            return f"{test} fails by a mistake of the table: {messages}"
    return None


def copy_sources(destination: Path) -> None:
    """Copies the working tree without what git ignores; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():  # it may have been removed in the working tree
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name, follow_symlinks=False)


def _is_of(name: str, test: str) -> bool:
    """Whether a node id is that of a test, of a case of it, or of a method of a class."""
    return name == test or name.startswith((f"{test}[", f"{test}::"))

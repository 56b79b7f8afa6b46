"""Runs modules in processes of their own: the pretended device and the interpreter are whole processes' matters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the repository, with the given variables set."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def must_run(*arguments: str, **environment: str) -> str:
    """What a successful run prints; a failed one fails the test with what it said."""
    run = run_python(*arguments, **environment)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout

"""Runs modules in processes of their own: the pretended device and the interpreter are whole processes' matters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def must_run(*arguments: str, **environment: str) -> str:
    """What `python ARGUMENTS` prints in the repository, with the given variables set; a failed run fails the test."""
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout

"""What every benchmark here writes beside its figures: machine, versions, commit, command."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def median(measure: Callable[[], float], repeats: int) -> float:
    """Of `repeats` measurements, after one that is not counted."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def machine() -> str:
    """Processors and versions, in one line."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return (
        f"{gpu}{platform.machine()}, {_cpu_model()}, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}"
    )


def commit() -> str | None:
    """The commit that is checked out, with a plus sign if files differ from it."""
    revision = _git("rev-parse", "--short", "HEAD")
    return revision and revision + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def write_results(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes figures with where they come from to a JSON file, if one was asked for."""
    if path is None:
        return
    command = " ".join(["python", "profiles/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    record = {"machine": machine(), "commit": commit(), "command": command, "figures": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines: list[str] = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _git(*arguments: str) -> str | None:
    run = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return run.stdout.strip() or None if run.returncode == 0 else None

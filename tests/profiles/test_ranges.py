"""Ranges reach a tool that listens to NVTX: one that is built here, in place of Nsight Systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from hybrid_runtime.engine.ranged_cache import RangedCache

ROOT = Path(__file__).parents[2]
WORKLOAD = "profiles/trace.py --no-profile --compile off --device cpu --batch 4 --prefix 48"


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the listener writes while the workload of `nsight.sh` runs."""
    library = tmp_path_factory.mktemp("listener") / "listener.so"
    source = Path(__file__).parent / "nvtx_listener.cpp"
    compiler = cpp_extension.get_cxx_compiler()
    subprocess.run([compiler, "-shared", "-fPIC", "-Werror", "-Wall", str(source), "-o", str(library)], check=True)
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(library)}
    command = [sys.executable, *WORKLOAD.split()]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [line for line in run.stdout.splitlines() if line.startswith(("push ", "pop "))]


def test_ranges_are_those_of_the_phases(heard: list[str]) -> None:
    """Inside of `steady`, where the profile begins and ends; every range that is opened is closed."""
    steady = heard[heard.index("push steady@hybrid_runtime") :]
    for name in ("schedule", "prepare", "load", "copy", "run.prefill", "run.decode.b2", "apply", "cache.match"):
        assert f"push {name}@hybrid_runtime" in steady
    assert steady[-1] == "pop @hybrid_runtime"
    depth = 0
    for place, line in enumerate(heard):
        depth += 1 if line.startswith("push") else -1
        assert depth >= 0, place
    assert depth == 0


def test_a_cache_that_starts_over_keeps_its_ranges() -> None:
    cache = RangedCache("cost", on_evict=print)
    emptied = cache.emptied()
    assert isinstance(emptied, RangedCache)
    assert (emptied._policy, emptied.on_evict) == ("cost", print)

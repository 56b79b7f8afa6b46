"""Parts of the check that are programs of their own: tests on the device, benchmarks, a run under Nsight Systems."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.on_device import VARIABLE
from tests.gpu.report import Details, NotHere

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = ROOT / "tests" / "ops" / "triton_kernels" / "interpreted"
KERNEL_FILES = ("state_updates.py", "short_conv.py", "slot_copies.py", "decode.py", "trees.py")
ENGINE_TESTS = {
    "tests/engine/test_equivalences.py": "",
    "tests/engine/test_host_cache.py": "(batches or too_small or preempted or reset) and not file",
}
SMALL_BENCH = "--prompt 40 --batch 1 2 --decode-prompt 8 --decode 3 --shared 128 --repeat 1 --buffer-mib 1"


def kernels_equal_their_twins(device: str) -> Details:
    """The kernels' own tests against float64; on a CPU in Triton's interpreter, as in the test suite."""
    arguments = ["-p", "tests.gpu.on_device", *(str(KERNEL_TESTS / file) for file in KERNEL_FILES)]
    environment = {VARIABLE: device}
    if device == "cpu":
        arguments = ["-p", "tests.ops.triton_kernels.interpreted.plugin", *arguments]
        environment["TRITON_INTERPRET"] = "1"
    return {"pytest": _pytest(*arguments, **environment)}


def engine_tests_on_the_device(device: str) -> Details:
    """Runtimes take the GPU of their own accord; without one these are the ordinary tests."""
    return {path: _pytest(path, *(["-k", chosen] if chosen else [])) for path, chosen in ENGINE_TESTS.items()}


def engine_benchmark(device: str, config: Path | None) -> Details:
    """`bench_engine.py` at its own sizes; with the `config` of a small model, at small ones."""
    small = [] if config is None else [*SMALL_BENCH.split(), "--memory-gib", "0.05", "--config", str(config)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        _run("profiles/bench_engine.py", "--device", device, *small, "--out", str(out))
        figures = json.loads(out.read_text())["figures"]
    return {**figures["limits"], "rows": figures["rows"]}


def op_benchmark(device: str, *, small: bool) -> Details:
    """`bench_ops.py`, at its own sizes or at small ones."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = ["--batch", "1", "2", "--shape", "small", "--buffer-mib", "1"] if small else []
        _run("profiles/bench_ops.py", "--device", device, *options, "--out", str(out))
        figures = json.loads(out.read_text())["figures"]
    return {"read_gb_s": figures["limits"]["read_gb_s"], "rows": figures["rows"]}


def nsight_run(device: str) -> Details:
    """A steady phase under Nsight Systems, from which `profiles/NSIGHT.md` reads."""
    if device == "cpu":
        _run("profiles/trace.py", "--no-profile", "--device", "cpu", "--compile", "off", "--steps", "5")
        raise NotHere("no GPU: the workload ran without Nsight Systems")
    if shutil.which("nsys") is None:
        raise NotHere("nsys is not installed; profiles/nsight.sh runs it where it is")
    return {"output": _finish(["bash", "profiles/nsight.sh", "systems"], {})[-300:]}


def _pytest(*arguments: str, **environment: str) -> str:
    """The last line of a test run."""
    lines = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **environment).strip().splitlines()
    return lines[-1]


def _run(*arguments: str, **environment: str) -> str:
    return _finish([sys.executable, *arguments], environment)


def _finish(command: list[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, f"{' '.join(command)}: {run.stdout[-1500:]}{run.stderr[-1500:]}"
    return run.stdout

"""The GPU check: what must hold of captured steps on a device, and what they reach. One command, one report.

    python -m tests.gpu [--only steps tokens] [--out profiles/results/gpu_check_NAME]
    python -m tests.gpu --dry-run

Equivalences of DESIGN.md under real capture, on a small random model of each architecture; the Triton kernels against
float64; launches and waits of a decode step; engine tests on the device; benchmarks beside the measured bandwidth; a
run under Nsight Systems if there is one. Ends with 1 if a check failed, and with 2 on a machine without a GPU.
`--dry-run` runs the same code on a CPU, without capture: it finds mistakes of the check, and nothing about GPUs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from hybrid_runtime.speculative_config import ROLLBACKS
from profiles.measuring import commit, machine
from tests.engine.helpers import MIXER_KINDS, model_of
from tests.gpu import launches, programs
from tests.gpu.models import dense_model
from tests.gpu.report import Details, run_check, write_report
from tests.gpu.steps import StepChecks
from tests.gpu.tokens import TokenChecks
from tests.gpu.trees import TreeChecks

GROUPS = ("steps", "trees", "tokens", "launches", "kernels", "engine", "benchmarks", "nsight")
STEP_DTYPES = (torch.float32, torch.bfloat16)
TOKEN_DTYPES = ("float64", "float32")
Check = tuple[str, Callable[[], Details]]


def main() -> None:
    options = _parser().parse_args()
    console = Console()
    if not torch.cuda.is_available() and not options.dry_run:
        console.print("there is no GPU here: --dry-run runs the check on the CPU, to find mistakes in it")
        sys.exit(2)
    device = "cpu" if options.dry_run else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        results = [run_check(name, check, console) for name, check in _checks(options, device, Path(folder))]
    origin = {
        "machine": machine(),
        "commit": commit(),
        "command": " ".join(["python -m tests.gpu", *sys.argv[1:]]),
        "device": "cpu, a dry run: it says nothing about a GPU" if options.dry_run else torch.cuda.get_device_name(),
    }
    out = options.out or Path("profiles/results") / f"gpu_check_{_file_name(device)}"
    write_report(out, origin, results)
    failed = [result.name for result in results if result.status == "failed"]
    console.print(f"{len(results)} checks, {len(failed)} failed; report: {out}.md, {out}.json", markup=False)
    sys.exit(1 if failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, without capture")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=GROUPS, help="groups of checks")
    parser.add_argument("--kinds", nargs="+", default=list(MIXER_KINDS), choices=list(MIXER_KINDS), help="of mixers")
    parser.add_argument("--compile", default="auto", choices=["auto", "off"], help="off: to check the check quickly")
    parser.add_argument("--out", type=Path, help="report, without suffix")
    return parser


def _checks(options: argparse.Namespace, device: str, folder: Path) -> Iterator[Check]:
    """Every check that was asked for, by name; models are built when their check comes."""
    for kind in options.kinds:
        if "steps" in options.only:
            for dtype in STEP_DTYPES:
                yield from _step_checks(kind, dtype, device, options.compile)
        if "trees" in options.only:
            for rollback in ROLLBACKS:
                yield from _tree_checks(kind, rollback, device, options.compile)
        if "tokens" in options.only:
            for name in TOKEN_DTYPES:
                label = f"tokens of every way to run, {kind}, {name}"
                yield label, lambda k=kind, n=name: TokenChecks(model_of(k), n, device, options.compile).run()  # type: ignore[misc]
        if "launches" in options.only:
            count = partial(launches.one_launch_per_decode_step, model_of(kind), device, options.compile)
            yield f"one graph launch per decode step, {kind}", count
            count_rounds = partial(launches.two_launches_per_round, model_of(kind), device, options.compile)
            yield f"two graph launches per speculative round, {kind}", count_rounds
    if "kernels" in options.only:
        yield "kernels equal their twins", partial(programs.kernels_equal_their_twins, device)
    if "engine" in options.only:
        yield "engine tests on the device", partial(programs.engine_tests_on_the_device, device)
    if "benchmarks" in options.only:
        config = _small_config(folder) if options.dry_run else None
        yield "engine benchmark", partial(programs.engine_benchmark, device, config)
        yield "op benchmark", partial(programs.op_benchmark, device, small=options.dry_run)
    if "nsight" in options.only:
        yield "a run under Nsight Systems", partial(programs.nsight_run, device)


def _step_checks(kind: str, dtype: torch.dtype, device: str, compile_mode: str) -> Iterator[Check]:
    """The three share one compilation, which the first one makes."""
    made: list[StepChecks] = []

    def checks() -> StepChecks:
        if not made:
            made.append(StepChecks(dense_model(kind), dtype, torch.device(device), compile_mode))
        return made[0]

    label = f"{kind}, {str(dtype).removeprefix('torch.')}"
    yield f"captured equals plain, bit for bit, {label}", lambda: checks().captured_equals_plain()
    yield f"decode errs at most twice as eager, {label}", lambda: checks().decode_is_within_budget()
    yield f"prefill errs at most twice as eager, {label}", lambda: checks().prefill_is_within_budget()


def _tree_checks(kind: str, rollback: str, device: str, compile_mode: str) -> Iterator[Check]:
    made: list[TreeChecks] = []

    def checks() -> TreeChecks:
        if not made:
            made.append(TreeChecks(dense_model(kind), rollback, torch.float32, torch.device(device), compile_mode))
        return made[0]

    label = f"{kind}, {rollback}"
    yield f"captured verify and commit equal plain ones, bit for bit, {label}", lambda: checks().captured_equals_plain()
    yield f"verify and commit err at most twice as eager, {label}", lambda: checks().is_within_budget()


def _small_config(folder: Path) -> Path:
    """The folder of a small model's config, with the name of its architecture."""
    config = model_of("mamba2").config
    config.architectures = [type(model_of("mamba2")).__name__]
    config.save_pretrained(folder)
    return folder


def _file_name(device: str) -> str:
    name = "dry_run" if device == "cpu" else torch.cuda.get_device_name()
    return re.sub(r"\W+", "_", name).strip("_").lower()


if __name__ == "__main__":
    main()

"""`python -m hybrid_runtime.lowering_report`: the table, a JSON file, the check, the record."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_runtime.graphs.lowering.report import StepReport

RECORD = Path(__file__).with_name("launches.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the report and returns the exit status: 1 if `--check` found something."""
    options = parse_options(arguments)
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # read by torch at import: no worker processes for a few kernels
    from hybrid_runtime.lowering_report.run import examine_models

    return publish(examine_models(options.models, options.steps), options)


def publish(reports: Sequence[StepReport], options: argparse.Namespace) -> int:
    """Prints, writes, records and checks reports, as the options say; the exit status."""
    from hybrid_runtime.graphs.lowering import check
    from hybrid_runtime.graphs.lowering.report import as_json, table

    print(table(reports))
    if options.json is not None:
        options.json.write_text(json.dumps({**_origin(), "steps": as_json(reports)}, indent=1) + "\n")
    recorded = check.read_record(options.record_file) if options.record_file.exists() else {}
    if options.record:
        check.write_record(options.record_file, reports, recorded)
        recorded = check.read_record(options.record_file)
    failures = check.failures(reports, recorded) if options.check else []
    if failures:
        print(f"\n{len(failures)} failures:", *failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_runtime.lowering_report", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="architectures (default: all)")
    parser.add_argument("--steps", nargs="+", metavar="TEXT", help="only steps whose name has one of these in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the reports to FILE")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 on a finding, or on more launches than recorded"
    )
    parser.add_argument("--record", action="store_true", help="record the launches as the new limit")
    parser.add_argument("--record-file", type=Path, default=RECORD, metavar="FILE", help="default: %(default)s")
    return parser.parse_args(arguments)


def _origin() -> dict[str, str | None]:
    """What the numbers hang on: compilers, and the state of the sources."""
    return {
        "device": "pretended sm_90",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, Triton {version('triton')}",
        "commit": _commit(),
        "command": "python -m hybrid_runtime.lowering_report",
    }


def _commit() -> str | None:
    """The commit that is checked out; None outside of a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())

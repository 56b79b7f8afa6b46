"""Runs the kernels' tests in `interpreted/` on the CPU, in Triton's interpreter.

They have a process of their own, since Triton decides when it is imported whether it interprets. Hence their file
names, which pytest does not collect. To run one file by hand:

    TRITON_INTERPRET=1 python -m pytest -p tests.ops.triton_kernels.interpreted.plugin FILE
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]
FILES = ["state_updates.py", "short_conv.py", "slot_copies.py", "decode.py", "trees.py", "draw.py"]


def test_kernels_in_the_interpreter() -> None:
    plugins = ["-p", "no:cacheprovider", "-p", "tests.ops.triton_kernels.interpreted.plugin"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *(FOLDER / file for file in FILES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

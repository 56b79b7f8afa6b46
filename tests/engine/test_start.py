"""What a runtime says while it compiles its steps, and what it does where they cannot be compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_runtime import HybridRuntime
from hybrid_runtime.engine.compiled_steps import NUM_PARTS

COMPLETE = """
import logging
from hybrid_runtime import HybridRuntime
logging.basicConfig(level=logging.WARNING)
with HybridRuntime("tiny", num_kv_slots=200, num_state_slots=6) as rt:
    print(rt.generate("import os", max_tokens=2, temperature=0.0)[0].outputs[0].finish_reason)
"""


def test_a_start_says_what_is_being_done(capsys: pytest.CaptureFixture[str]) -> None:
    with HybridRuntime("tiny", num_kv_slots=200, num_state_slots=6):
        said = capsys.readouterr().err
    parts = ("choice of tokens", "prefill", "decode", "kernels", "trial run")
    assert len(parts) == NUM_PARTS
    for part in parts:
        assert f"compiling steps, once per model and machine: {part}" in said


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "CompilerNotFound: the CPU kernels need a C++ compiler"),
        ("echo no headers >&2; exit 1", "RuntimeError: .* failed to build the CPU kernels"),
        ('case "$*" in *-dM*) exit 0;; esac; exit 1', ".*No working C++ compiler"),
    ],
    ids=["none", "broken", "broken later"],
)
def test_without_a_working_compiler_steps_run_eagerly_and_that_is_said(
    compiler: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "c++"
    if compiler is not None:
        path.write_text(f"#!/bin/sh\n{compiler}\n")
        path.chmod(0o755)
    folders = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment = {**os.environ, "CXX": str(path), **folders}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == "length\n"
    assert re.search(f"steps are not compiled and run several times slower: {said.replace('C++', 'C..')}", done.stderr)

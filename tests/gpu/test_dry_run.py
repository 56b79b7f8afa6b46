"""The GPU check runs, as far as a CPU allows, and notices what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybrid_runtime.graphs.commit_runner import CommitRunner, _shapes
from hybrid_runtime.graphs.decode_runner import DecodeRunner
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.graphs.verify_runner import VerifyRunner
from tests.engine.helpers import model_of
from tests.gpu.on_device import OnDevice
from tests.gpu.steps import StepChecks
from tests.gpu.trees import TreeChecks

ROOT = Path(__file__).parents[2]


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as on a machine without a GPU, whatever this one has."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_dry_run_passes_and_writes_its_report(tmp_path: Path) -> None:
    """Everything that needs no other program, on one model, with steps that are not compiled."""
    groups = ["--only", "steps", "trees", "tokens", "launches", "--kinds", "mamba2", "--compile", "off"]
    run = run_check("--dry-run", *groups, "--out", str(tmp_path / "check"))
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "check.json").read_text())
    assert {check["status"] for check in record["checks"]} == {"passed"}
    assert len(record["checks"]) == 16
    assert "dry run" in record["device"]
    assert (tmp_path / "check.md").read_text().count("| passed |") == 16


def test_without_a_gpu_it_says_so() -> None:
    run = run_check()
    assert run.returncode == 2
    assert "there is no GPU here" in run.stdout


@pytest.fixture(scope="module")
def checks() -> StepChecks:
    return StepChecks(model_of("gdn"), torch.float32, torch.device("cpu"), "off")


def test_another_order_of_rows_is_not_the_same(checks: StepChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows swapped in the runner that stands for the captured one, which is made first."""
    made: list[DecodeRunner] = []
    run = DecodeRunner.run

    def swapped(self: DecodeRunner, fields_Fn: NDArray[np.int64]) -> Any:
        made.append(self)
        return run(self, fields_Fn[:, ::-1] if self is made[0] else fields_Fn)

    monkeypatch.setattr(DecodeRunner, "run", swapped)
    with pytest.raises(AssertionError, match="2 rows, mix 0: tensor 0"):
        checks.captured_equals_plain()


def test_padding_that_reaches_a_state_is_found(checks: StepChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows that name working slot 1 in place of the null slot."""
    load = DecodeRunner._load

    def careless(self: DecodeRunner, fields_Fn: NDArray[np.int64], bucket: int) -> None:
        load(self, fields_Fn, bucket)
        self._inputs_of(bucket)[0].working_slots_B[fields_Fn.shape[1] :] = 1

    monkeypatch.setattr(DecodeRunner, "_load", careless)
    with pytest.raises(AssertionError, match="padded, 3 rows"):
        checks.decode_is_within_budget()


@pytest.fixture(scope="module")
def tree_checks() -> TreeChecks:
    return TreeChecks(model_of("gdn"), "fold", torch.float32, torch.device("cpu"), "off")


def test_trees_that_see_other_nodes_are_not_the_same(tree_checks: TreeChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the runner that stands for the captured one each node sees itself and the root alone."""
    made: list[VerifyRunner] = []
    run = VerifyRunner.run

    def uprooted(self: VerifyRunner, arrays: Mapping[str, NDArray[np.int64]]) -> Any:
        made.append(self)
        bits_BT = arrays["ancestor_bits_BT"]
        lone_BT = np.broadcast_to(1 << np.arange(bits_BT.shape[1]) | 1, bits_BT.shape)
        return run(self, {**arrays, "ancestor_bits_BT": lone_BT} if self is made[0] else arrays)

    monkeypatch.setattr(VerifyRunner, "run", uprooted)
    with pytest.raises(AssertionError, match="mix 0: tensor 0"):
        tree_checks.captured_equals_plain()


def test_a_padding_row_that_commits_is_found(tree_checks: TreeChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts its root, into the state of slot 1."""
    load = CommitRunner._load

    def careless(self: CommitRunner, inputs: CommitInputs, num_rows: int, num_nodes: int) -> None:
        load(self, inputs, num_rows, num_nodes)
        fields = self._arrays.views(_shapes(num_rows, num_nodes))
        for name in ("destinations_B", "num_nodes_B"):
            fields[name][len(inputs.request_rows_B) :] = 1

    monkeypatch.setattr(CommitRunner, "_load", careless)
    with pytest.raises(AssertionError, match="3 rows: tensor"):
        tree_checks.is_within_budget()


def test_tensors_without_a_device_are_moved() -> None:
    generator = torch.Generator().manual_seed(0)
    with OnDevice(torch.device("meta")):
        assert torch.randn(3, generator=generator).is_meta
        assert torch.tensor([1, 2]).is_meta
        assert torch.zeros(2, device=None).is_meta
        assert not torch.zeros(2, device="cpu").is_meta

"""Verifies and commits against each other: captured and plain, compiled and eager, padded and not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_runtime.engine.steps import Steps
from hybrid_runtime.graphs.verify_runner import verify_buckets
from hybrid_runtime.models.adapters import adapt
from tests.gpu.report import Details
from tests.gpu.rig import Rig
from tests.gpu.steps import assert_same_bits, assert_within_budget
from tests.gpu.tree_rig import TreeRig

BATCH = 11
SIZES = (1, 2, 3, 7, 8, BATCH)  # edges of buckets


class TreeChecks:
    """The checks of one model and rollback in one dtype. `compile_mode` as for `StepChecks`."""

    def __init__(
        self,
        reference: PreTrainedModel,
        rollback: str,
        dtype: torch.dtype,
        device: torch.device,
        compile_mode: str = "auto",
    ) -> None:
        model: Any = copy.deepcopy(reference)
        model.to(device).to(dtype)
        rig, exact = Rig(adapt(model), BATCH), Rig(adapt(copy.deepcopy(model).double()), BATCH)
        exact.take(rig)
        self.rig, self.exact = TreeRig(rig, rollback), TreeRig(exact, rollback)
        self.steps: Steps = self.rig.eager() if compile_mode == "off" else self.rig.compiled()
        self.captures = device.type == "cuda" and compile_mode != "off"
        self.buckets = verify_buckets(BATCH)

    def captured_equals_plain(self) -> Details:
        """Bit for bit, for three mixes of rows of each size."""
        captured = self.rig.runners(self.steps, buckets=self.buckets, capture=self.captures)
        plain = self.rig.runners(self.steps, buckets=self.buckets, capture=False)
        for num_rows in SIZES:
            for seed in range(3):
                one = self.rig.round(num_rows, seed)
                outcome, expected = (self.rig.outcome(runners, one) for runners in (captured, plain))
                assert_same_bits(outcome, expected, f"{num_rows} rows, mix {seed}")
        return {"sizes": list(SIZES), "captured": self.captures}

    def is_within_budget(self) -> Details:
        """Twice what eager steps err against float64: logits, hidden states, states and KV."""
        padded = self.rig.runners(self.steps, buckets=self.buckets, capture=self.captures)
        plain = self.rig.runners(self.rig.eager(), buckets=None, capture=False)
        truth = self.exact.runners(self.exact.eager(), buckets=None, capture=False)
        worst = 0.0
        for num_rows in SIZES:
            one = self.rig.round(num_rows, seed=num_rows)
            outcome, expected = (self.rig.outcome(runners, one) for runners in (padded, plain))
            exact = self.exact.outcome(truth, one)
            worst = max(worst, assert_within_budget(outcome, expected, exact, f"{num_rows} rows"))
        return {"error over eager's": worst}

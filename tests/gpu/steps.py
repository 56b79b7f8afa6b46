"""Steps against each other: captured and plain, compiled and eager, padded and not, in a batch and alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_runtime.engine.steps import StepOutputs, Steps
from hybrid_runtime.graphs.step_graphs import batch_buckets
from hybrid_runtime.models.adapters import adapt
from tests.gpu.report import Details
from tests.gpu.rig import Rig

BATCH = 20
PREFILLS = ([1], [64], [65, 1, 7], [33, 40, 2, 90, 1])
Outcome = tuple[StepOutputs, list[Tensor]]


class StepChecks:
    """The checks of one model in one dtype. `compile_mode`: "off" checks the checks, where compiling takes too long."""

    def __init__(
        self, reference: PreTrainedModel, dtype: torch.dtype, device: torch.device, compile_mode: str = "auto"
    ) -> None:
        model: Any = copy.deepcopy(reference)
        model.to(device).to(dtype)
        self.rig = Rig(adapt(model), BATCH)
        self.exact = Rig(adapt(copy.deepcopy(model).double()), BATCH)
        self.exact.take(self.rig)
        self.steps: Steps = self.rig.eager() if compile_mode == "off" else self.rig.compiled()
        self.captures = device.type == "cuda" and compile_mode != "off"

    def captured_equals_plain(self) -> Details:
        """Bit for bit, at every edge of every bucket, for three mixes of rows each."""
        buckets = batch_buckets(BATCH)
        captured = self.rig.runner(self.steps, buckets=buckets, capture=self.captures)
        plain = self.rig.runner(self.steps, buckets=buckets, capture=False)
        sizes = sorted({size for bucket in buckets for size in (bucket - 1, bucket) if 0 < size <= BATCH} | {BATCH})
        for num_rows in sizes:
            for seed in range(3):
                fields = self.rig.decode_fields(num_rows, seed)
                outcome = self.rig.outcome(lambda fields=fields: captured.run(fields))  # type: ignore[misc]
                expected = self.rig.outcome(lambda fields=fields: plain.run(fields))  # type: ignore[misc]
                assert_same_bits(outcome, expected, f"{num_rows} rows, mix {seed}")
        return {"sizes": sizes, "captured": self.captures}

    def decode_is_within_budget(self) -> Details:
        """Twice what eager steps err against float64, outputs and pools; the same for padded batches and lone rows."""
        eager, exact = self.rig.eager(), self.exact.eager()
        forms = {
            "compiled": self.rig.runner(self.steps, buckets=None, capture=False),
            "padded": self.rig.runner(self.steps, buckets=batch_buckets(BATCH), capture=self.captures),
        }
        plain = self.rig.runner(eager, buckets=None, capture=False)
        truth = self.exact.runner(exact, buckets=None, capture=False)
        worst = dict.fromkeys(forms, 0.0)
        for num_rows in (1, 3, 8, 13, BATCH):
            fields = self.rig.decode_fields(num_rows, seed=num_rows)
            plain_outcome = self.rig.outcome(lambda fields=fields: plain.run(fields))  # type: ignore[misc]
            true_outcome = self.exact.outcome(lambda fields=fields: truth.run(fields))  # type: ignore[misc]
            for name, runner in forms.items():
                outcome = self.rig.outcome(lambda fields=fields, runner=runner: runner.run(fields))  # type: ignore[misc]
                label = f"{name}, {num_rows} rows"
                worst[name] = max(worst[name], assert_within_budget(outcome, plain_outcome, true_outcome, label))
        return {f"error over eager's, {name}": ratio for name, ratio in worst.items()}

    def prefill_is_within_budget(self) -> Details:
        """The same for prefills of several shapes, none of which compiles anything anew."""
        eager, exact = self.rig.eager(), self.exact.eager()
        worst = 0.0
        for lengths in PREFILLS:
            inputs, exact_inputs = (rig.prefill_inputs(lengths, seed=len(lengths)) for rig in (self.rig, self.exact))
            draw = self.rig.draw(inputs)
            outcome = self.rig.outcome(lambda inputs=inputs, draw=draw: self.steps.prefill(inputs, draw))  # type: ignore[misc]
            plain = self.rig.outcome(lambda inputs=inputs, draw=draw: eager.prefill(inputs, draw))  # type: ignore[misc]
            truth = self.exact.outcome(lambda inputs=exact_inputs, draw=draw: exact.prefill(inputs, draw))  # type: ignore[misc]
            worst = max(worst, assert_within_budget(outcome, plain, truth, f"prefill of {lengths}"))
        return {"error over eager's": worst}


def assert_same_bits(outcome: Outcome, expected: Outcome, label: str) -> None:
    pairs = [*zip(outcome[0], expected[0], strict=True), *zip(outcome[1], expected[1], strict=True)]
    for number, (ours, theirs) in enumerate(pairs):
        same = torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
        assert same, f"{label}: tensor {number} of {len(pairs)} differs by {_distance(ours, theirs)}"


def assert_within_budget(outcome: Outcome, plain: Outcome, exact: Outcome, label: str) -> float:
    """Returns the largest ratio of errors among those that matter. NaN in the same places counts as equal."""
    worst = 0.0
    floats: Sequence[tuple[Tensor, Tensor, Tensor]] = [
        (outcome[0].logits_BV, plain[0].logits_BV, exact[0].logits_BV),
        *zip(outcome[1], plain[1], exact[1], strict=True),
    ]
    for number, (ours, eager, truth) in enumerate(floats):
        assert torch.equal(ours.isnan(), truth.isnan()), f"{label}: tensor {number} has NaN elsewhere"
        error, budget = _rms(ours.double() - truth), _rms(eager.double() - truth)
        # float32 arithmetic in another order may err by one eps where the eager form is exact by luck
        floor = torch.finfo(torch.float32).eps * _rms(truth)
        assert error <= 2 * budget + floor, f"{label}: tensor {number} errs by {error:.3g}, eager by {budget:.3g}"
        if budget > floor:
            worst = max(worst, error / budget)
    return worst


def _rms(values: Tensor) -> float:
    return values.double().nan_to_num(0.0).square().mean().sqrt().item() if values.numel() else 0.0


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().nan_to_num(0.0).max())

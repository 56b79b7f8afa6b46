"""Examines the steps of models under the pretended device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from hybrid_runtime.graphs.lowering.assemble import KernelCache
from hybrid_runtime.graphs.lowering.examine import examine
from hybrid_runtime.graphs.lowering.fake_cuda import pretend_cuda
from hybrid_runtime.graphs.lowering.report import StepReport
from hybrid_runtime.lowering_report.models import ARCHITECTURES
from hybrid_runtime.lowering_report.steps import steps_of


def examine_models(models: Sequence[str] | None = None, steps: Sequence[str] | None = None) -> list[StepReport]:
    """The reports of all steps of the named architectures (default: all) whose names contain one of `steps`.

    Replaces what `pretend_cuda` replaces while it runs: give it a process of its own. Raises ValueError for an
    architecture that the report does not know.
    """
    unknown = sorted(set(models or ()) - set(ARCHITECTURES))
    if unknown:
        raise ValueError(f"unknown models {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}")
    reports = []
    with pretend_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors that are asked for their address, and of Triton's defaults
        kernels = KernelCache()
        for architecture in models or ARCHITECTURES:
            for step in steps_of(architecture):
                if steps is None or any(text in step.name for text in steps):
                    reports.append(examine(step, kernels.assemble))
    return reports

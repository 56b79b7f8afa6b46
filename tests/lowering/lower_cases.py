"""`python -m tests.lowering.lower_cases FOLDER`: examines the planted steps and lowers the small ones, for the tests.

In a process of its own, because the pretended device is the whole process's.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_runtime.graphs.lowering.capture import lower
from hybrid_runtime.graphs.lowering.examine import examine
from hybrid_runtime.graphs.lowering.fake_cuda import pretend_cuda
from hybrid_runtime.graphs.lowering.report import as_json
from hybrid_runtime.graphs.lowering.step import Step
from tests.lowering.planted import FAULTS, SOUND
from tests.lowering.small_steps import SMALL_STEPS


def main(folder: Path) -> None:
    with pretend_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reports = as_json([examine(case.step()) for case in (*FAULTS, *SOUND)])
        (folder / "reports.json").write_text(json.dumps(reports))
        for name, small in SMALL_STEPS.items():
            given = small.arguments()
            with FakeTensorMode():
                fakes = tuple(torch.empty(real.shape, dtype=real.dtype, device="cuda") for real in given)
            lowered = lower(Step(name, small.function, fakes))
            order = [each.argument for each in lowered.inputs]
            (folder / f"{name}.json").write_text(json.dumps({"code": lowered.code, "order": order}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`TRITON_INTERPRET=1 python -m tests.lowering.interpret_cases FOLDER`: runs what `lower_cases` lowered, beside eager.

Writes, for each result and each mutated argument of a small step, how far the generated module and eager are from
float64 (root mean squares), and how large the numbers are. Runs the kernel of `interpret_kernel` as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.graphs.lowering.interpret import run_generated
from tests.lowering import interpret_kernel
from tests.lowering.small_steps import SMALL_STEPS, SmallStep, widened


def main(folder: Path) -> None:
    compared = {}
    for name, small in SMALL_STEPS.items():
        lowered = json.loads((folder / f"{name}.json").read_text())
        with torch.no_grad():
            compared[name] = compare(small, lowered["code"], lowered["order"])
    (folder / "interpreted.json").write_text(json.dumps(compared))
    (folder / "kernel.json").write_text(json.dumps(interpret_kernel.differences()))


def compare(small: SmallStep, code: str, order: list[int]) -> list[dict[str, Any]]:
    """One entry per result and per argument that eager changes."""
    generated, eager, exact = small.arguments(), small.arguments(), widened(small.arguments())
    generated_results = run_generated(code, [generated[index] for index in order])
    eager_results, exact_results = small.function(*eager), small.function(*exact)
    entries = [
        entry(f"result {index}", *results)
        for index, results in enumerate(zip(generated_results, eager_results, exact_results, strict=True))
    ]
    for index, before in enumerate(small.arguments()):
        if not torch.equal(before, eager[index]) or not torch.equal(before, generated[index]):
            entries.append(entry(f"argument {index}", generated[index], eager[index], exact[index]))
    return entries


def entry(name: str, generated: Tensor, eager: Tensor, exact: Tensor) -> dict[str, Any]:
    assert generated.dtype == eager.dtype
    assert generated.shape == eager.shape
    return {
        "name": name,
        "dtype": str(eager.dtype).removeprefix("torch."),
        "generated_error": rms(generated.double() - exact),
        "eager_error": rms(eager.double() - exact),
        "magnitude": rms(exact),
    }


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

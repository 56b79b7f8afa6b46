"""Generated modules, run in Triton's interpreter, compute what eager computes; so do hand-written kernels."""

from __future__ import annotations

import json

import pytest

from hybrid_runtime.graphs.lowering.interpreter_repairs import repair_interpreter
from tests.lowering.small_steps import SMALL_STEPS

EPS = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "int64": 0.0}
MUTATED = {"conv": {3}, "mamba2": {5}, "gdn": {5}, "attention": {3, 4}, "mlp": set(), "head": {3}}


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_a_generated_module_errs_at_most_twice_what_eager_errs(name, comparisons):
    """Against float64, in root mean squares. Where eager hits upon the rounded result, one rounding is allowed."""
    for entry in comparisons[name]:
        allowed = max(2 * entry["eager_error"], EPS[entry["dtype"]] * entry["magnitude"])
        assert entry["generated_error"] <= allowed, entry


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_exactly_the_pools_are_mutated(name, comparisons):
    names = {entry["name"] for entry in comparisons[name]}
    assert {entry for entry in names if entry.startswith("argument")} == {f"argument {i}" for i in MUTATED[name]}
    assert "result 0" in names


def test_a_hand_written_kernel_computes_what_pytorch_does(interpreted):
    differences = json.loads((interpreted / "kernel.json").read_text())
    assert differences.pop("dot") <= 1
    assert set(differences.values()) == {0.0}


def test_the_interpreter_is_refused_where_triton_compiles(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before it is imported"):
        repair_interpreter()

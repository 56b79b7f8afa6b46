"""A pytest plugin that makes Triton's interpreter compute as a GPU does, for a process that interprets."""

from __future__ import annotations

from hybrid_runtime.graphs.lowering.interpreter_repairs import repair_interpreter


def pytest_configure() -> None:
    repair_interpreter()

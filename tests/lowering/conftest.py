"""What the worker processes found, once for all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lowering.processes import must_run


@pytest.fixture(scope="session")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what `lower_cases` wrote."""
    folder = tmp_path_factory.mktemp("lowered")
    must_run("-m", "tests.lowering.lower_cases", str(folder))
    return folder


@pytest.fixture(scope="session")
def reports(lowered: Path) -> dict[str, dict[str, Any]]:
    """Reports of the planted and the sound steps, by name."""
    return {report["name"]: report for report in json.loads((lowered / "reports.json").read_text())}


@pytest.fixture(scope="session")
def interpreted(lowered: Path) -> Path:
    """The same folder, with what `interpret_cases` wrote into it."""
    must_run("-m", "tests.lowering.interpret_cases", str(lowered), TRITON_INTERPRET="1")
    return lowered


@pytest.fixture(scope="session")
def comparisons(interpreted: Path) -> dict[str, list[dict[str, Any]]]:
    """How far the generated modules of the small steps, and eager, are from float64."""
    found: dict[str, list[dict[str, Any]]] = json.loads((interpreted / "interpreted.json").read_text())
    return found

"""The table of planted faults fits the sources and the tests that it names. `make faults` does the rest."""

from __future__ import annotations

import ast
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.faults.fault import Edit, Fault, all_faults, all_not_built

ROOT = Path(__file__).parents[2]


@cache
def names_in(file: str) -> frozenset[str]:
    """The functions of a test file, and what it assigns to: that is how state machines become tests."""
    names: set[str] = set()
    for statement in ast.parse((ROOT / file).read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    return frozenset(names)


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: fault.name.replace(" ", "-"))
def test_each_fault_can_be_planted_and_names_tests_that_exist(fault: Fault, tmp_path: Path) -> None:
    for file in {edit.file for edit in fault.edits}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    fault.plant(tmp_path)
    assert all((tmp_path / edit.file).read_text() != (ROOT / edit.file).read_text() for edit in fault.edits)
    assert fault.tests
    for test in fault.tests:
        file, name = test.split("[")[0].split("::")
        assert name in names_in(file), test


def test_what_is_not_built_has_a_stand_in() -> None:
    assert {entry.stand_in for entry in all_not_built()} <= {fault.name for fault in all_faults()}


@pytest.mark.parametrize("old", ["    b = 2\n", "b = 1\n", "missing\n"])
def test_an_edit_wants_its_whole_lines_once(old: str, tmp_path: Path) -> None:
    source = "def f():\n    b = 2\n    b = 1\n    b = 2\n"
    (tmp_path / "a.py").write_text(source)
    with pytest.raises(ValueError, match="not once"):
        Edit("a.py", old, "").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == source

"""Faults that can be planted in a copy of the sources, and the table of them.

The table is made of the TOML files in `table/`. `[[fault]]` has the fields of `Fault`, its `[[fault.edits]]` those of
`Edit`; `[[not_built]]` has those of `NotBuilt`.
"""

from __future__ import annotations

import ast
import difflib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "table"


@dataclass(frozen=True)
class Edit:
    """Whole lines that occur once in a file, and what stands there instead."""

    file: str  # from the root of the repository
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Changes the file below `root`. Raises ValueError if the text is not there exactly once."""
        path = root / self.file
        source = "\n" + path.read_text()  # so that every line has a break before it
        count = source.count(f"\n{self.old}")
        if count != 1:
            raise ValueError(f"{self.file} has this {count} times, not once:\n{self.old}")
        path.write_text(source.replace(f"\n{self.old}", f"\n{self.new}")[1:])

    def changed_lines(self) -> list[str]:
        """What goes ("- ...") and what comes ("+ ..."), without indentation."""
        lines = difflib.ndiff(self.old.splitlines(), self.new.splitlines())
        return [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]


@dataclass(frozen=True)
class Fault:
    """A mistake, what a user would notice of it, and tests of which at least one must fail when it is planted.

    `kind`: one of the kinds of fault that the design lists as seen in other engines, if it is of one.
    """

    name: str
    harm: str
    edits: Sequence[Edit]
    tests: Sequence[str]  # node ids
    kind: str | None = None

    def plant(self, root: Path) -> None:
        """Changes the sources below `root`. Raises ValueError where they are not what they should be."""
        for edit in self.edits:
            edit.apply(root)
        for edit in self.edits:
            ast.parse((root / edit.file).read_text())  # what cannot be imported would fail any test


@dataclass(frozen=True)
class NotBuilt:
    """A kind of fault of something that is not there yet, and the fault that stands for it until then."""

    kind: str
    needs: str
    stand_in: str  # name of a Fault


def all_faults() -> list[Fault]:
    """The table, file by file. Raises ValueError for a name that occurs twice, TypeError for an unknown field."""
    faults = [_fault(entry) for entry in _entries("fault")]
    names = [fault.name for fault in faults]
    if len(set(names)) < len(names):
        raise ValueError(f"two faults have one name: {sorted(name for name in names if names.count(name) > 1)}")
    return faults


def all_not_built() -> list[NotBuilt]:
    return [NotBuilt(**entry) for entry in _entries("not_built")]


def _entries(key: str) -> Iterator[dict[str, Any]]:
    for path in sorted(TABLE.glob("*.toml")):
        yield from tomllib.loads(path.read_text()).get(key, [])


def _fault(entry: dict[str, Any]) -> Fault:
    return Fault(**{**entry, "edits": [Edit(**edit) for edit in entry["edits"]]})

"""What the README shows is what happens."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_transcript() -> None:
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert result.attempted >= 6
    assert result.failed == 0


def test_file_tree_names_what_there_is() -> None:
    """Every path of the annotated tree exists, and every top-level folder of the package is in it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"## Where things are\n+```\n(.*?)```", text, re.S)
    assert tree is not None
    named: set[str] = set()
    for line in tree.group(1).splitlines():
        indent = "hybrid_runtime/" if line.startswith(" ") else ""
        for path in re.findall(r"[\w/]+/(?=[ ,;]|$)|[\w/]+\.(?:py|md)\b", line.split("  made")[0]):
            if (ROOT / indent / path).exists():
                named.add(str(Path(indent) / path))
    folders = {f"hybrid_runtime/{path.name}" for path in (ROOT / "hybrid_runtime").iterdir() if path.is_dir()}
    folders -= {
        "hybrid_runtime/ops",
        "hybrid_runtime/graphs",
        "hybrid_runtime/__pycache__",
        "hybrid_runtime/checkpoints",
    }
    assert folders <= named, folders - named
    assert {"ops", "graphs", "tests", "profiles", "DESIGN.md"} <= named

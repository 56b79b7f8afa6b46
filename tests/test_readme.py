"""What the README shows is what happens."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_transcript() -> None:
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert result.attempted >= 6
    assert result.failed == 0


def test_the_code_under_use_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"## Use\n+```python\n(.*?)```", README, re.S)
    assert code is not None
    exec(compile(code.group(1), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "CacheStats(" in printed
    assert "hint" in printed, "the tree was not drawn"
    assert (tmp_path / "cache.safetensors").stat().st_size > 0
    header_hits = re.findall(r" (\d+) None$", printed, re.M)
    assert len(header_hits) == 2
    assert min(map(int, header_hits)) > 0


def test_file_tree_names_what_there_is() -> None:
    """Every path of the annotated tree exists, and every folder of the package is in it."""
    tree = re.search(r"## Where things are\n+```\n(.*?)```", README, re.S)
    assert tree is not None
    named: set[str] = set()
    folder = ""
    for line in tree.group(1).splitlines():
        names = re.split(r"\s{2,}", line.strip())[0]
        if not line.startswith(" "):
            folder = names
        named |= {str(Path(folder if line.startswith(" ") else "") / name) for name in names.split(", ")}
    assert not {name for name in named if not (ROOT / name).exists()}
    folders = {f"hybrid_runtime/{path.name}" for path in (ROOT / "hybrid_runtime").iterdir() if path.is_dir()}
    folders -= {
        "hybrid_runtime/ops",
        "hybrid_runtime/graphs",
        "hybrid_runtime/__pycache__",
        "hybrid_runtime/checkpoints",
    }
    assert folders <= named, folders - named

"""The walk-through shows what happens now, and its printer says who owns what."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from hybrid_runtime.walkthrough import __main__ as command
from hybrid_runtime.walkthrough.page import PAGE, PAGES, run_page
from hybrid_runtime.walkthrough.report import pool_line, slot_ranges


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_is_up_to_date(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    now = run_page(written, path)
    difference = "".join(difflib.unified_diff(written.splitlines(True), now.splitlines(True), "written", "now"))
    assert now == written, f"python -m hybrid_runtime.walkthrough --write brings it up to date:\n{difference}"


def test_the_command_prints_all_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = tmp_path / "a.md", tmp_path / "b.md"
    for page in pages:
        page.write_text(f"# {page.name}\n", encoding="utf-8")
    monkeypatch.setattr(command, "PAGES", pages)
    command.main([])
    assert capsys.readouterr().out == "# a.md\n# b.md\n"


def test_outputs_are_replaced_and_all_else_stays() -> None:
    page = "# T\n\n```python\nx = 1\n```\n\ntext\n\n```python\nprint(x + 1)\n```\n\n```text\n7\n```\n\nend\n"
    assert run_page(page) == page.replace("7", "2")
    assert run_page(run_page(page)) == run_page(page)


def test_an_output_comes_and_goes_with_what_is_printed() -> None:
    silent, printing = "```python\npass\n```\n", "```python\nprint(1)\n```\n"
    stale = "\n```text\nold\n```\n"
    assert run_page(f"{silent}{stale}end\n") == f"{silent}end\n"
    assert run_page(f"{printing}end\n") == printing + "\n```text\n1\n```\nend\n"


def test_an_error_names_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("# T\n\n```python\nx = 0\n1 / x\n```\n")
    assert [entry.lineno + 1 for entry in caught.traceback if entry.path == PAGE] == [5]


def test_the_command_updates_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(3)\n```\n", encoding="utf-8")
    monkeypatch.setattr(command, "PAGES", (page,))
    command.main(["--write"])
    assert page.read_text(encoding="utf-8") == "```python\nprint(3)\n```\n\n```text\n3\n```\n"


def test_slots_are_written_as_ranges() -> None:
    assert slot_ranges([3, 4, 5, 9, 8, 7, 8]) == "3-5 9 8 7-8"
    assert slot_ranges([]) == ""
    assert pool_line({1: "tree", 2: "tree", 3: "free", 4: "tree"}, 4) == "1-2 tree, 3 free, 4 tree"

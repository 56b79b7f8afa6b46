"""The command line of `python -m tests.faults`."""

from __future__ import annotations

import pytest

from tests.faults import __main__ as command
from tests.faults.fault import all_faults


@pytest.fixture(autouse=True)
def _nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        pytest.fail("tests are run")

    monkeypatch.setattr(command, "run_tests", fail)


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(["--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert "WORD" in said
    assert "--list" in said


def test_words_choose_the_faults(capsys: pytest.CaptureFixture[str]) -> None:
    names = [fault.name for fault in all_faults()]
    for words in ([], [names[0]], ["seed", "padding"]):
        assert command.main(["--list", *words]) == 0
        expected = [name for name in names if not words or any(word in name for word in words)]
        assert capsys.readouterr().out.splitlines() == expected
        assert expected


@pytest.mark.parametrize("arguments", [["no fault has such a name"], ["--lists"]])
def test_what_is_not_known_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(arguments)
    assert done.value.code == 2
    assert arguments[0] in capsys.readouterr().err

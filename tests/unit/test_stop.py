"""Stop strings in pieces of text, against a search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_runtime.text.stop import StopChecker

LETTERS = "ab"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4, unique=True)
PIECES = st.lists(st.text(LETTERS, max_size=6), max_size=8)


def naive_stop(text: str, stops: list[str], first_end: int) -> tuple[int, str] | None:
    """The stop string whose end comes first, at `first_end` or behind; the longest of several."""
    for end in range(first_end, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


@given(PIECES, STOPS, st.booleans(), st.integers(0, 3))
@example(["a", "ab"], ["aab", "ab", "b"], False, 0)
@example(["xab", "c"], ["ab", "xabc"], False, 1)
def test_like_a_search_over_the_whole_text(pieces, stops, include, num_unarmed):
    checker = StopChecker(stops, include)
    shown, seen = "", ""
    unarmed_length = len("".join(pieces[:num_unarmed]))
    for index, piece in enumerate(pieces):
        result = checker.append(piece, may_stop=index >= num_unarmed)
        seen += piece
        shown += result.text
        expected = naive_stop(seen, stops, unarmed_length + 1) if index >= num_unarmed else None
        if expected is not None:
            end, stop = expected
            assert result.stop == stop
            assert shown == seen[: end if include else end - len(stop)]
            assert checker.finish() == ""
            return
        assert result.stop is None
        assert seen.startswith(shown)
        # Held back: exactly the longest end of the text that a stop string may still begin with.
        held = seen[len(shown) :]
        starts = [seen[-size:] for size in range(1, len(seen) + 1)]
        assert held == max((s for s in starts if any(t.startswith(s) and t != s for t in stops)), key=len, default="")
    assert shown + checker.finish() == seen
    assert checker.finish() == ""


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_across_token_borders(include, text):
    checker = StopChecker(["STOP"], include)
    results = [checker.append(piece) for piece in ["one ", "S", "TO", "P two"]]
    assert "".join(result.text for result in results) == text
    assert [result.stop for result in results] == [None, None, None, "STOP"]


def test_without_stop_strings_nothing_is_held_back():
    checker = StopChecker([])
    assert checker.append("abc").text == "abc"
    assert checker.finish() == ""

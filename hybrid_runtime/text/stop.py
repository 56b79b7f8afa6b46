"""Stop strings, found in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    """What one piece of text led to."""

    text: str  # may be shown now; together with the earlier ones, all that will ever be shown of the text so far
    stop: str | None  # the stop string that was hit; `text` is then the last


class StopChecker:
    """Finds the stop string that ends first in a text, whatever pieces the text comes in; the longest of several.

    Text that may be the beginning of a stop string is held back until it is known not to be. Nothing follows a hit.
    A piece costs the length of the piece and of the stop strings, not of the whole text.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """`stop_strings`: non-empty. `include_stop_str_in_output`: whether the text ends behind the stop string."""
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop_str_in_output
        self._max_held = max((len(stop) for stop in self._stop_strings), default=1) - 1
        self._held = ""  # longest end of the text so far that is a proper beginning of a stop string

    def append(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Takes the next piece of text. With `may_stop=False` a stop string that ends in this piece is passed over."""
        buffer, num_old = self._held + text, len(self._held)
        hit = self._first_stop(buffer, num_old) if may_stop else None
        if hit is not None:
            end, stop = hit
            self._held = ""
            return StopResult(buffer[: end if self._include_stop else end - len(stop)], stop)
        num_shown = self._held_start(buffer)
        self._held = buffer[num_shown:]
        return StopResult(buffer[:num_shown], None)

    def finish(self) -> str:
        """The text that was held back, when the end comes without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """End and name of the stop string that ends first behind the first `num_old` characters, if there is one.

        One that began before `buffer` would have kept its beginning in it.
        """
        hits = []
        for stop in self._stop_strings:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                hits.append((start + len(stop), stop))
        return min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def _held_start(self, buffer: str) -> int:
        """Where the longest end of `buffer` starts that is a proper beginning of a stop string."""
        for start in range(max(0, len(buffer) - self._max_held), len(buffer)):
            end = buffer[start:]
            if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop_strings):
                return start
        return len(buffer)

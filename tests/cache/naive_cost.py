"""The `cost` policy over whole prefixes: no heap, no hashes, no running counts.

A kind's numbers are recounted from everything that ever happened to it, so that this is right only while no kind has
been halved, that is, for fewer than `MEMORY` states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.cache.helpers import Prefix

Kind = tuple[object, ...]


@dataclass
class NaiveState:
    origin: str
    kind: Kind
    since: float
    used: bool
    known: int
    priority: float = 0.0


@dataclass
class NaiveCost:
    """States in the tree and after it. `interval` is `MARK_INTERVAL`."""

    interval: int
    clock: float = 0.0
    states: dict[Prefix, NaiveState] = field(default_factory=dict)
    ghosts: list[tuple[Prefix, Kind | None, float]] = field(default_factory=list)
    events: list[tuple[str, Kind, float]] = field(default_factory=list)
    max_ghosts: int = 0

    def chance(self, kind: Kind) -> float:
        return (1 + self._count("use", kind)) / (2 + self._count("state", kind) - self._count("left", kind))

    def mean_wait(self, kind: Kind) -> float:
        waits = [wait for what, which, wait in self.events if (what, which) == ("use", kind)]
        return sum(waits) / (1 + len(waits))

    def value(self, prefix: Prefix) -> float:
        kind = self.states[prefix].kind
        covers = [
            n
            for n in range(1, len(prefix))
            if prefix[:n] in self.states and self.chance(self.states[prefix[:n]].kind) >= self.chance(kind)
        ]
        value = self.chance(kind) * (len(prefix) - max(covers, default=0))
        return value if value >= self.mean_wait(kind) / 2 else 0.0

    def arrive(self, prefix: Prefix, origin: str, in_use: Iterable[Prefix]) -> Prefix | None:
        """Returns the prefix that the request resumed from; `in_use` are those whose states are locked."""
        above = [prefix[:n] for n in range(1, len(prefix)) if prefix[:n] in self.states]
        resumed = [each for each in above if self.states[each].used or each in in_use]
        source = resumed[-1] if resumed else None
        start = len(above[-1]) if above else 0
        known = 0 if not above else start if above[-1] == source else self.states[above[-1]].known
        marks = [prefix[:n] for n in range(self.interval, len(prefix) + 1, self.interval) if n > start]
        returned = False
        for mark in reversed(marks):
            place = next((i for i, ghost in enumerate(self.ghosts) if ghost[0] == mark), None)
            if place is not None:
                _, kind, since = self.ghosts[place]
                if kind is not None:
                    self.events.append(("use", kind, self.clock - since))
                    self.ghosts[place] = mark, None, since
                known, returned = len(mark), mark == marks[-1]
                break
        if source is not None:
            state = self.states[source]
            self._leave(state.kind)
            state.kind = self._enter(state.origin, _share(len(source), len(prefix)))
        kind = self._enter(origin, None) if returned else self._enter(origin, "new", _share(known, len(prefix)))
        self.states[prefix] = NaiveState(origin, kind, self.clock, False, known)
        self.max_ghosts = max(self.max_ghosts, 8 * len(self.states))
        return source

    def use(self, prefix: Prefix) -> None:
        state = self.states[prefix]
        self.events.append(("use", state.kind, self.clock - state.since))
        state.since, state.used = self.clock, True
        state.kind = self._enter(state.origin, None)

    def place(self, prefix: Prefix) -> None:
        self.states[prefix].priority = self.clock + self.value(prefix)

    def evict(self, prefix: Prefix, evictable: Sequence[Prefix]) -> None:
        """The clock moves if it is one of those that should go first."""
        state = self.states[prefix]
        if state.priority == min(self.states[each].priority for each in evictable):
            self.clock = state.priority
        del self.states[prefix]
        mark = prefix[: len(prefix) // self.interval * self.interval]
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != mark]
        self.ghosts.append((mark, state.kind, state.since))
        self.ghosts = self.ghosts[-self.max_ghosts :]

    def _count(self, what: str, kind: Kind) -> int:
        return sum(event[:2] == (what, kind) for event in self.events)

    def _enter(self, *kind: object) -> Kind:
        self.events.append(("state", kind, 0.0))
        return kind

    def _leave(self, kind: Kind) -> None:
        """Never more uses than states."""
        if 2 + self._count("state", kind) - self._count("left", kind) - 1 >= 1 + self._count("use", kind):
            self.events.append(("left", kind, 0.0))


def _share(known: int, length: int) -> int:
    """0, 1 or 2: the new part is more than half, more than a quarter, or at most a quarter."""
    part = (length - known) / length
    return 0 if part > 1 / 2 else 1 if part > 1 / 4 else 2

"""How much a request drafts, by how its drafts fared."""

from __future__ import annotations

PATIENCE = 2
"""Rounds in a row whose drafts are all rejected before the request drafts less."""
FIRST_PAUSE = 8
LONGEST_PAUSE = 128
"""In rounds without drafts, before one is tried again."""
SILENCE = 16
ASK_EVERY = 4
"""After so many rounds in a row in which nothing was drafted, the drafter is asked in every so many rounds only."""


class DraftBudget:
    """The number of nodes that one request may draft in its next round.

    The rule: `PATIENCE` rounds in a row in which no draft is accepted halve the limit, down to 0; a round in which one
    is accepted doubles it, up to `max_nodes`. At 0 the request decodes plainly for `FIRST_PAUSE` rounds and then probes
    with one node. If that is rejected the next pause is twice as long, up to `LONGEST_PAUSE`; if it is accepted the
    limit grows again and the next pause is a first one. Rounds in which nothing could be drafted say nothing about the
    drafts, so they only let a pause go by. But who had nothing to draft for `SILENCE` rounds is asked less often
    (`is_due`): asking costs a few per cent of a small model's step.

    Why: a verify costs more with every node, and a rejected draft earns nothing. Whether any was accepted is counted,
    not the share, because most nodes of a tree are rejected even when all goes well. Halving and doubling make a change
    of text cost a few rounds. A request of which every second round accepts something stays at its limit, and where
    nothing ever is, one round in `LONGEST_PAUSE + 1` verifies one node in the end. No clock and no randomness: what a
    run drafts can be repeated.
    """

    def __init__(self, max_nodes: int) -> None:
        """`max_nodes` do not count the root; at least 1."""
        if max_nodes < 1:
            raise ValueError(f"max_nodes must be at least 1, not {max_nodes}")
        self._max_nodes = max_nodes
        self._limit = max_nodes
        self._num_failures = 0  # rounds in a row
        self._next_pause = FIRST_PAUSE
        self._num_paused = 0  # rounds that are left of a pause
        self._num_silent = 0  # rounds in a row in which nothing was drafted
        self.num_rounds = 0  # those that drafted something
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def limit(self) -> int:
        """Nodes that the next round may draft, the root not counted."""
        return self._limit

    @property
    def is_due(self) -> bool:
        """Whether the next round is to ask the drafter."""
        return self._num_silent < SILENCE or self._num_silent % ASK_EVERY == 0

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in one round of the request, of nodes without the root; also one that drafted nothing: (0, 0).

        A result may come after the limit has fallen below what it drafted, as those of rounds in flight do.
        """
        if not 0 <= num_accepted <= num_drafted <= self._max_nodes:
            raise ValueError(f"{num_accepted} accepted of {num_drafted} drafted, where {self._max_nodes} are allowed")
        if num_drafted == 0:
            self._num_silent += 1
            self._wait()
            return
        self._num_silent = 0
        self.num_rounds += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        if num_accepted:
            self._grow()
        else:
            self._fail()

    def _wait(self) -> None:
        if self._limit == 0:
            self._num_paused -= 1
            if self._num_paused == 0:
                self._limit = 1
                self._num_failures = PATIENCE - 1  # one more ends the probe

    def _grow(self) -> None:
        self._limit = min(max(2 * self._limit, 1), self._max_nodes)
        self._num_failures = 0
        self._next_pause = FIRST_PAUSE

    def _fail(self) -> None:
        if self._limit == 0:  # the pause has begun while this round was in flight
            return
        self._num_failures += 1
        if self._num_failures == PATIENCE:
            self._num_failures = 0
            self._limit //= 2
            if self._limit == 0:
                self._num_paused = self._next_pause
                self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

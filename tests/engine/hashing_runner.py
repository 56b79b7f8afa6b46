"""A runner whose "model" is a hash: exact, fast, and wrong the moment anything reads a slot that is not its own.

The KV of a token is the hash of all tokens up to it, a state is the hash of all tokens it covers, and the next token is
drawn from the state. So the content of every slot can be checked at any time without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.engine.commits import Commits
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.results import ForwardResult, SampledToken
from hybrid_runtime.memory.request_table import TableEntries
from hybrid_runtime.memory.slots import SlotArray
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import ScheduledStep

POISON = "nobody's"
NAN = "not a number"
NUM_TOKENS = 3
NO_TOKEN = -1


def content(tokens: Sequence[int] | np.ndarray) -> str:
    return ".".join(str(int(token)) for token in tokens)


def next_token(state: str, sample_index: int) -> int:
    """Any fixed function that varies will do; few different tokens make prompts meet outputs."""
    return sum((place + 1 + sample_index) * ord(letter) for place, letter in enumerate(state)) % 101 % NUM_TOKENS


def require(holds: bool, what: object) -> None:
    """As `assert`, in a forward: the engine would take any `Exception` for a forward that fails, and run it again."""
    if not holds:
        pytest.fail(f"in a forward: {what}")


@dataclass(frozen=True)
class Work:
    """Tokens `[start, stop)` of a request, as they were when the step was prepared: nothing else is read of it."""

    request: Request
    row: int
    working_slot: int
    start: int
    stop: int
    known: tuple[int, ...]  # tokens that the host knows: all, or all but the last of `stop`
    num_kv_slots: int
    protected_length: int
    checkpoints: tuple[Checkpoint, ...]
    chooses: bool
    is_invalid: bool


@dataclass(frozen=True)
class PreparedStep:
    entries: TableEntries | None
    filled: tuple[tuple[int | None, int], ...]  # (source or None, working slot) of each admission
    forwards: tuple[tuple[Work, ...], ...]
    free_kv: SlotArray
    free_states: SlotArray
    before_forward: Callable[[Sequence[Request]], None]


@dataclass(frozen=True)
class LaunchedStep:
    results: list[ForwardResult]

    def wait(self) -> list[ForwardResult]:
        return self.results


class HashingRunner:
    """Has the methods of `ModelRunner` that the engine calls.

    The device's side (`kv`, `states`, a copy of the request table, the token chosen last for each of its rows) is read
    and written in the order of the steps only, in whatever thread runs them. Slots that nobody owns when a step is
    prepared are overwritten right before it: that is the moment from which they may be used for something else.

    `before_forward` is called with the requests of each forward; if it raises, their states and KV are left half
    written. `is_invalid` says whether the next logits of a request are NaN. Both are those of the time at which the
    step was prepared. `delay` is called before, between and after the forwards.
    """

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory
        self.kv = [POISON] * (memory.supply.kv.num_slots + 1)
        self.states = [POISON] * (memory.supply.states.num_slots + 1)
        self.table = memory.table.slots.copy()
        self.last_tokens = [NO_TOKEN] * len(self.table)
        self.before_forward: Callable[[Sequence[Request]], None] = lambda requests: None
        self.is_invalid: Callable[[Request], bool] = lambda request: False
        self.delay: Callable[[], None] = lambda: None
        self.commits = Commits(lambda inputs: None, torch.device("cpu"), is_lazy=False)  # nothing is drafted

    def poison_free_slots(self) -> None:
        """While nothing is in flight."""
        self._poison(self.memory.supply.kv.free_slots(), self.memory.supply.states.free_slots())

    def check_tree(self) -> None:
        """Every node's KV and state are those of the tokens from the root to its end."""
        prefixes = {self.memory.cache.root: ""}
        for node in self.memory.cache.nodes():
            assert node.parent is not None
            prefix = prefixes[node.parent]
            for token, slot in zip(node.key, node.kv_slots, strict=True):
                prefix = f"{prefix}.{int(token)}" if prefix else str(int(token))
                assert self.kv[slot] == prefix, (self.kv[slot], prefix)
            prefixes[node] = prefix
            if node.state_slot is not None:
                assert self.states[node.state_slot] == prefix, (self.states[node.state_slot], prefix)

    def repack_weights(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Holds nothing that is worth giving back."""

    def prepare(self, step: ScheduledStep) -> PreparedStep:
        chunks = [self._work(c.request, c.start, c.stop, c.checkpoints, is_last=c.is_last) for c in step.prefill]
        rows = [
            self._work(r.request, r.position, r.stop, (r.checkpoint,) if r.checkpoint else (), is_last=True)
            for r in step.decode
        ]
        return PreparedStep(
            entries=self.memory.table.take_writes(),
            filled=tuple((each.copied_from, each.request.resident.working_slot) for each in step.admissions),
            forwards=tuple(tuple(works) for works in (chunks, rows) if works),
            free_kv=self.memory.supply.kv.free_slots(),
            free_states=self.memory.supply.states.free_slots(),
            before_forward=self.before_forward,
        )

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        self.delay()
        self._poison(prepared.free_kv, prepared.free_states)
        if prepared.entries is not None:
            self.table.reshape(-1)[prepared.entries.places] = prepared.entries.slots
        for source, working_slot in prepared.filled:
            self.states[working_slot] = "" if source is None else self.states[source]
        results = []
        for works in prepared.forwards:
            results.append(self._forward(works, prepared.before_forward))
            self.delay()
        return LaunchedStep(results)

    def _work(
        self, request: Request, start: int, stop: int, checkpoints: tuple[Checkpoint, ...], *, is_last: bool
    ) -> Work:
        require(start == request.num_computed_tokens, f"from {start}, computed are {request.num_computed_tokens}")
        residence = request.resident
        return Work(
            request=request,
            row=residence.row,
            working_slot=residence.working_slot,
            start=start,
            stop=stop,
            known=tuple(request.tokens[:stop].tolist()),
            num_kv_slots=residence.num_kv_slots,
            protected_length=residence.protected_length,
            checkpoints=checkpoints,
            chooses=is_last and not request.is_prefill_only,
            is_invalid=self.is_invalid(request),
        )

    def _poison(self, kv_slots: SlotArray, state_slots: SlotArray) -> None:
        for slot in kv_slots:
            self.kv[slot] = POISON
        for slot in state_slots:
            self.states[slot] = POISON

    def _forward(self, works: Sequence[Work], before_forward: Callable[[Sequence[Request]], None]) -> ForwardResult:
        requests = [work.request for work in works]
        require(len({id(request) for request in requests}) == len(requests), "a request occurs twice")
        try:
            before_forward(requests)
        except BaseException:
            for work in works:  # half written
                self._write(work, POISON)
            raise
        sampled = []
        invalid = []
        for work in works:
            if work.is_invalid or self.states[work.working_slot] == NAN:  # from the step before
                self._write(work, NAN)
                invalid.append(work.request)
                self.last_tokens[work.row] = 0
                continue
            tokens = self._compute(work)
            if work.chooses:
                self.last_tokens[work.row] = next_token(content(tokens), work.request.sample_index)
                sampled.append(SampledToken(work.request, self.last_tokens[work.row], None))
        return ForwardResult(sampled, [], frozenset(invalid))

    def _write(self, work: Work, what: str) -> None:
        """Overwrites all that a forward writes for a request."""
        for slot in self.table[work.row, work.start : work.stop]:
            self.kv[slot] = what
        for slot in (work.working_slot, *(checkpoint.state_slot for checkpoint in work.checkpoints)):
            self.states[slot] = what

    def _compute(self, work: Work) -> list[int]:
        """Checks all that the forward would read, then writes what it would write. Returns the tokens up to there."""
        slots, tokens = self.table[work.row], list(work.known)
        require(work.stop <= work.num_kv_slots, f"{work.stop} tokens, {work.num_kv_slots} KV slots")
        prefix = content(tokens[: work.start])
        require(self.states[work.working_slot] == prefix, f"{self.states[work.working_slot]}, not {prefix}")
        for position in range(work.start):
            expected = content(tokens[: position + 1])
            require(self.kv[slots[position]] == expected, f"KV {position}: {self.kv[slots[position]]}, not {expected}")
        if len(tokens) < work.stop:
            tokens.append(self.last_tokens[work.row])
        require(len(tokens) == work.stop and tokens[-1] != NO_TOKEN, "a token that nobody has chosen")
        for position in range(work.start, work.stop):
            require(position >= work.protected_length, "the tree's KV would be overwritten")
            self.kv[slots[position]] = content(tokens[: position + 1])
        self.states[work.working_slot] = content(tokens)
        for checkpoint in work.checkpoints:
            require(work.start < checkpoint.length <= work.stop, checkpoint)
            self.states[checkpoint.state_slot] = content(tokens[: checkpoint.length])
        return tokens

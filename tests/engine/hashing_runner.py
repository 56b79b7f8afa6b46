"""A runner whose "model" is a hash: exact, fast, and wrong the moment anything reads a slot that is not its own.

The KV of a token is the hash of all tokens up to it, a state is the hash of all tokens it covers, and the next token is
drawn from the state. So the content of every slot can be checked at any time without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.results import ForwardResult, SampledToken
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Admission
from hybrid_runtime.scheduling.scheduler import DecodeRow, PrefillChunk, ScheduledStep

POISON = "nobody's"
NUM_TOKENS = 3


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
class LaunchedStep:
    results: list[ForwardResult]

    def wait(self) -> list[ForwardResult]:
        return self.results


class HashingRunner:
    """Has the methods of `ModelRunner` that the engine calls.

    `before_forward` is called with the requests of each forward; if it raises, their states and KV are left half
    written. `is_invalid` says whether the next logits of a request are NaN.
    """

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory
        self.kv = [POISON] * (memory.supply.kv.num_slots + 1)
        self.states = [POISON] * (memory.supply.states.num_slots + 1)
        self.before_forward: Callable[[Sequence[Request]], None] = lambda requests: None
        self.is_invalid: Callable[[Request], bool] = lambda request: False

    def poison_free_slots(self) -> None:
        for slot in self.memory.supply.kv.free_slots():
            self.kv[slot] = POISON
        for slot in self.memory.supply.states.free_slots():
            self.states[slot] = POISON

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

    def prepare(self, step: ScheduledStep) -> ScheduledStep:
        return step

    def launch(self, prepared: ScheduledStep) -> LaunchedStep:
        self.prepare_states(prepared.admissions)
        results = [self.prefill(prepared.prefill)] if prepared.prefill else []
        if prepared.decode:
            results.append(self.decode(prepared.decode))
        return LaunchedStep(results)

    def prepare_states(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            source = admission.copied_from
            self.states[admission.request.resident.working_slot] = "" if source is None else self.states[source]

    def prefill(self, chunks: Sequence[PrefillChunk]) -> ForwardResult:
        self._start_forward([chunk.request for chunk in chunks])
        for chunk in chunks:
            self._compute(chunk.request, chunk.start, chunk.stop)
            for checkpoint in chunk.checkpoints:
                require(chunk.start < checkpoint.length <= chunk.stop, checkpoint)
                self.states[checkpoint.state_slot] = content(chunk.request.tokens[: checkpoint.length])
        sampled = [chunk.request for chunk in chunks if chunk.is_last and not chunk.request.is_prefill_only]
        return self._result([chunk.request for chunk in chunks], sampled)

    def decode(self, rows: Sequence[DecodeRow]) -> ForwardResult:
        requests = [row.request for row in rows]
        self._start_forward(requests)
        for row in rows:
            require(row.request.num_uncomputed_tokens == 1, row.request)
            self._compute(row.request, row.request.num_computed_tokens, row.request.num_tokens)
            if row.checkpoint is not None:
                require(row.checkpoint.length == row.request.num_tokens, row.checkpoint)
                self.states[row.checkpoint.state_slot] = self.states[row.request.resident.working_slot]
        return self._result(requests, [request for request in requests if not request.is_prefill_only])

    def _start_forward(self, requests: Sequence[Request]) -> None:
        require(len({id(request) for request in requests}) == len(requests), "a request occurs twice")
        try:
            self.before_forward(requests)
        except BaseException:
            for request in requests:  # half written
                self.states[request.resident.working_slot] = POISON
                own = self.memory.table.slots[request.resident.row, request.num_computed_tokens : request.num_tokens]
                for slot in own:
                    self.kv[slot] = POISON
            raise

    def _compute(self, request: Request, start: int, stop: int) -> None:
        """Checks all that the forward would read, then writes what it would write."""
        residence = request.resident
        slots = self.memory.table.slots[residence.row]
        require(stop <= residence.num_kv_slots, f"{stop} tokens, {residence.num_kv_slots} KV slots")
        require(start == request.num_computed_tokens, f"from {start}, computed are {request.num_computed_tokens}")
        require(self.states[residence.working_slot] == content(request.tokens[:start]), "the working slot is wrong")
        for position in range(start):
            require(self.kv[slots[position]] == content(request.tokens[: position + 1]), f"KV {position} is wrong")
        for position in range(start, stop):
            require(position >= residence.protected_length, "the tree's KV would be overwritten")
            self.kv[slots[position]] = content(request.tokens[: position + 1])
        self.states[residence.working_slot] = content(request.tokens[:stop])

    def _result(self, requests: Sequence[Request], sampled: Sequence[Request]) -> ForwardResult:
        invalid = frozenset(request for request in requests if self.is_invalid(request))
        for request in invalid:  # what is not a number has gone into all that was written
            self.states[request.resident.working_slot] = POISON
        tokens = [
            SampledToken(request, next_token(content(request.tokens[:]), request.sample_index), None)
            for request in sampled
            if request not in invalid
        ]
        return ForwardResult(tokens, [], invalid)

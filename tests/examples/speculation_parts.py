"""The source document's draft tree, a drafter that is told what to draft, and a log of what rounds do to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime import HybridRuntime, SpeculativeConfig
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.speculative.draft import Draft, DraftRow
from tests.cache.helpers import ints
from tests.engine.helpers import greedy, random_tokens, runtime_of, solo_tokens
from tests.examples.parts import state_of

DOCUMENT_PARENTS = (-1, -1, -1, 0, 0, 0, 1, 1, 1)
"""9.6: `retrieve_parent_token` of d0 .. d8, in which -1 stands for the main state."""
PARENTS = tuple(parent + 1 for parent in DOCUMENT_PARENTS)
"""The same tree with the last sampled token as node 0: d0 .. d8 are nodes 1 .. 9."""
RIGHT_PATH = (2, 8)
"""d1 and d7: what the scripted drafts get right, so that neither node numbers nor steps are those of a chain."""
ACCEPTED = (0, *RIGHT_PATH)

ROLLBACKS = ("fold", "replay", "snapshot")
TOLERANCE = 1e-9  # float64, where the forms of one recurrence differ by about 1e-14


@cache
def truth_of(prompt_len: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt and what plain decoding makes of it, one token at a time."""
    prompt = random_tokens(np.random.default_rng(prompt_len), prompt_len)
    return (*prompt, *solo_tokens("kda", [prompt], [num_tokens])[0])


class ScriptedDrafter:
    """Drafts one shape of tree in every round; the nodes of one path are what the target will say, all others not."""

    def __init__(self, truth: Sequence[int], parents: Sequence[int], right: Sequence[int]) -> None:
        """`parents[i]` is that of node i + 1; `right`: the path's nodes without the root, from the root down."""
        self.truth = tuple(truth)
        self.parents = tuple(parents)
        self.right = {node: depth for depth, node in enumerate(right, start=1)}

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftRow) -> Draft:
        num_tokens, num_nodes = len(row.tokens), min(row.max_nodes, len(self.parents))
        coming = (*self.truth[num_tokens - 1 :], *([0] * len(self.parents)))
        tokens = [
            coming[self.right[node]] if node in self.right else self._wrong(coming, node)
            for node in range(1, num_nodes + 1)
        ]
        return Draft(ints(tokens), ints(self.parents[:num_nodes]))

    def _wrong(self, coming: Sequence[int], node: int) -> int:
        """A token that none of the next ones is, and no other node's."""
        return [token for token in range(100) if token not in coming[: len(self.parents) + 2]][node]


@dataclass(frozen=True)
class Event:
    """Something that a round did, and the request's working slot and the whole state pool right afterwards."""

    name: str
    length: int  # tokens that count as computed
    working: list[Tensor]
    states: list[Tensor]


@dataclass
class Rounds:
    """Logs what a runtime with one request does: "draft", "verify" (before and after), "commit".

    `after_verify` is called with the records of each layer when a verify is over, before its verdict.
    """

    rt: HybridRuntime
    after_verify: Callable[[Sequence[dict[str, Tensor]]], None] = lambda records: None
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine = self.rt._engine
        assert engine.scheduler.drafting is not None
        engine.scheduler.drafting.drafter = _LoggedDrafter(engine.scheduler.drafting.drafter, self)
        steps: Any = _LoggedSteps(engine.runner.steps, self)
        engine.runner.steps = steps

    @property
    def request(self) -> Request:
        [request] = self.rt._engine.scheduler.running
        return request

    @property
    def records(self) -> Sequence[Any]:
        return self.rt._engine.memory.step_memory.record_layers

    def note(self, name: str) -> None:
        running = self.rt._engine.scheduler.running
        if running:
            slot = running[0].resident.working_slot
            working, length = state_of(self.rt, slot), running[0].num_computed_tokens
            self.events.append(Event(name, length, working, pool_content(self.rt)))

    def names(self) -> list[str]:
        return [event.name for event in self.events]


@dataclass(frozen=True)
class _LoggedDrafter:
    drafter: Any
    rounds: Rounds

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts: list[Draft] = self.drafter.draft(rows)
        self.rounds.note("draft")
        return drafts


@dataclass(frozen=True)
class _LoggedSteps:
    steps: Any
    rounds: Rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def verify(self, *arguments: Any) -> Any:
        self.rounds.note("before verify")
        outputs = self.steps.verify(*arguments)
        self.rounds.note("verify")
        self.rounds.after_verify(self.rounds.records)
        return outputs

    def commit(self, *arguments: Any) -> None:
        self.steps.commit(*arguments)
        self.rounds.note("commit")


def speculative_runtime(rollback: str, drafter: Any, *, tree_size: int = 10, **options: Any) -> HybridRuntime:
    """The KDA model with a drafter that a test brings, trees of at most `tree_size` nodes, the root included."""
    config = SpeculativeConfig(
        "ngram", num_steps=tree_size, topk=3, num_draft_tokens=tree_size, rollback=rollback, adaptive=False
    )
    defaults: dict[str, Any] = {"max_num_seqs": 1, "num_state_slots": 8, "num_kv_slots": 400, "max_model_len": 320}
    return runtime_of("kda", drafter=drafter, speculative=config, **{**defaults, **options})


def start(rt: HybridRuntime, truth: Sequence[int], prompt_len: int) -> None:
    """Adds the request whose plain output `truth` tells, and computes its prompt."""
    rt.add_request(list(truth[:prompt_len]), greedy(len(truth) - prompt_len), request_id="R")
    rt.step()


def finish(rt: HybridRuntime) -> tuple[int, ...]:
    """Steps until the request has ended; returns its output."""
    outputs = []
    while rt.has_unfinished:
        outputs = rt.step()
    return outputs[0].outputs[0].token_ids


def pool_content(rt: HybridRuntime) -> list[Tensor]:
    """A copy of all state slots, tensor by tensor."""
    return [tensor.clone() for layer in rt._engine.memory.state_pool.layers for tensor in layer.values()]


def kv_content(rt: HybridRuntime) -> list[Tensor]:
    """A copy of all KV slots, tensor by tensor."""
    return [tensor.clone() for layer in rt._engine.memory.kv_pool.layers for tensor in layer.values()]


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all bytes are equal: 0 and -0 are not, a NaN and its copy are."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def assert_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@cache
def stepwise_states(truth: tuple[int, ...], prompt_len: int) -> dict[int, list[Tensor]]:
    """The state after each number of tokens from the prompt's length on, as plain decoding leaves it."""
    states: dict[int, list[Tensor]] = {}
    with runtime_of("kda", max_num_seqs=1, num_state_slots=4) as rt:
        rt.add_request(list(truth[:prompt_len]), greedy(len(truth) - prompt_len + 1))
        rt.step()
        while rt.has_unfinished:
            [request] = rt._engine.scheduler.running
            states[request.num_computed_tokens] = state_of(rt, request.resident.working_slot)
            rt.step()
    return states

"""The source document's prompts as tokens, its slot numbers as free lists, and ways to read the tree back.

The document says how many tokens its phrases have; here they are any different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.request_factory import RequestFactory
from hybrid_runtime.engine.request_group import Prompt, RequestGroup
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.plan import plan_memory
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.scheduling.scheduler import Scheduler
from tests.engine.hashing_runner import HashingRunner

YOU_ARE_A = tuple(range(20, 30))  # 10 tokens
HELPFUL_ASSISTANT = tuple(range(30, 50))  # 20
SYSTEM = YOU_ARE_A + HELPFUL_ASSISTANT  # "You are a helpful assistant.": 30
WRITE_CODE = tuple(range(50, 61))  # 11
CODING_EXPERT = tuple(range(61, 76))  # 15
TELL_ME_A_JOKE = tuple(range(76, 86))  # 10
WRITE_PYTHON_CODE = tuple(range(86, 101))  # 15


def letters(text: str) -> tuple[int, ...]:
    """One token per letter; the hash that stands for a model only ever says 0, 1 or 2."""
    return tuple(text.encode())


@dataclass(frozen=True)
class Edge:
    """A node of the tree with the tokens that lead to it from its parent."""

    tokens: tuple[int, ...]
    kv_slots: tuple[int, ...]
    state_slot: int | None = None
    origin: str | None = None


def edge(
    tokens: Iterable[int], kv_slots: Iterable[int], state_slot: int | None = None, origin: str | None = None
) -> Edge:
    return Edge(tuple(tokens), tuple(kv_slots), state_slot, origin)


def edges(cache: RadixCache) -> set[Edge]:
    """The whole tree: as no token occurs twice in a prompt here, edges say where they belong."""
    return {edge(node.key.tolist(), node.kv_slots.tolist(), node.state_slot, node.origin) for node in cache.nodes()}


def slots(first: int, last: int) -> list[int]:
    """The document's `[first..last]`, both included."""
    return list(range(first, last + 1))


def hand_out_first(allocator: SlotAllocator, wanted: Sequence[int]) -> None:
    """Makes the free list give these slots next, in this order; all must be free."""
    free = allocator.allocate(allocator.num_free).tolist()
    assert set(wanted) <= set(free)
    allocator.release([*(slot for slot in reversed(free) if slot not in wanted), *reversed(wanted)])


def state_of(rt: HybridRuntime, slot: int) -> list[torch.Tensor]:
    """A copy of what a state slot holds, tensor by tensor."""
    return [tensor[slot].clone() for layer in rt._engine.memory.state_pool.layers for tensor in layer.values()]


class HashedEngine:
    """The real engine, scheduler, cache and pools' bookkeeping with a hash for a model.

    Every forward checks the content of all that it reads, and after every step every slot has one owner and the tree's
    slots hold what their tokens say.
    """

    def __init__(self, *, policy: CheckpointPolicy | None = None, max_num_batched_tokens: int = 100) -> None:
        config = RuntimeConfig(num_kv_slots=300, num_state_slots=120, max_num_seqs=4, max_model_len=60)
        plan = plan_memory(config, (), (), model_max_len=60, available_bytes=1)
        self.memory = EngineMemory(plan, (), (), max_num_seqs=4, eviction="lru", device=torch.device("cpu"))
        self.runner = HashingRunner(self.memory)
        residency = Residency(self.memory.supply, self.memory.table, enabled=True, policy=policy)
        scheduler = Scheduler(residency, max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens)
        runner: Any = self.runner
        self.engine = Engine(scheduler, runner, self.memory, tokenizer=None, debug_checks=True)
        self._factory = RequestFactory(None, max_model_len=60, eos_token_ids=frozenset(), seed=0)

    @property
    def cache(self) -> RadixCache:
        return self.memory.cache

    def hand_out_first(self, *, kv: Sequence[int] = (), states: Sequence[int] = ()) -> None:
        hand_out_first(self.memory.supply.kv, kv)
        hand_out_first(self.memory.supply.states, states)

    def add(self, name: str, prompt: Sequence[int], *, max_tokens: int = 1) -> RequestGroup:
        return self._add(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), is_prefill_only=False)

    def warm_up(self, prompt: Sequence[int]) -> None:
        """What `HybridRuntime.warmup` does with token ids."""
        hints = [len(prompt) - 1]
        params = SamplingParams(max_tokens=1, checkpoint_positions=hints)
        self._add("warm-up", prompt, params, is_prefill_only=True)
        self.run()

    def step(self) -> None:
        self.runner.poison_free_slots()
        self.engine.step()
        self.runner.check_tree()
        self.engine.progressed.clear()

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.engine.groups:
            self.step()

    def row(self, request: Request) -> list[int]:
        """The KV slots of a running request's tokens, in order."""
        residence = request.resident
        return self.memory.table.slots[residence.row, : residence.num_kv_slots].tolist()

    def _add(self, name: str, prompt: Sequence[int], params: SamplingParams, *, is_prefill_only: bool) -> RequestGroup:
        group = self._factory.new_group(name, Prompt(tuple(prompt), None), params, 0, is_prefill_only=is_prefill_only)
        self.engine.add(group)
        return group

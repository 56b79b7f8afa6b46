"""A whole engine over a hash for a model, and what must hold of it after every step and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.request_factory import RequestFactory
from hybrid_runtime.engine.request_group import Prompt, RequestGroup
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.plan import plan_memory
from hybrid_runtime.outputs import CompletionOutput
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.host_tier import HostTier
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.scheduling.scheduler import Scheduler
from hybrid_runtime.scheduling.supply import SlotSupply
from tests.engine.hashing_launchers import OverlapKind, launcher_of
from tests.engine.hashing_runner import HashingRunner, content, next_token
from tests.engine.hashing_store import HashingStore, check_contents, poison_free_slots


class HashingEngine:
    """The real engine, scheduler, cache and bookkeeping. Every forward checks all that it reads.

    `host`: numbers of KV and state slots of a second tier. `overlap`: how steps run beside the scheduling of the next.
    """

    def __init__(
        self,
        *,
        num_kv: int,
        num_states: int,
        max_len: int,
        num_seqs: int = 4,
        budget: int = 16,
        policy: CheckpointPolicy | None = None,
        host: tuple[int, int] | None = None,
        eviction: str = "lru",
        overlap: OverlapKind | None = None,
    ) -> None:
        policy = policy or CheckpointPolicy(min_saving=2)
        config = RuntimeConfig(
            num_kv_slots=num_kv, num_state_slots=num_states, max_num_seqs=num_seqs, max_model_len=max_len
        )
        plan = plan_memory(config, (), (), model_max_len=max_len, available_bytes=1)
        self.memory = EngineMemory(plan, (), (), max_num_seqs=num_seqs, eviction=eviction, device=torch.device("cpu"))
        self.runner = HashingRunner(self.memory)
        self.store: HashingStore | None = None
        self.tier: HostTier | None = None
        if host is not None:
            slots = SlotSupply(SlotAllocator(host[0]), SlotAllocator(host[1]), RadixCache(eviction))
            self.store = HashingStore(self.runner, num_kv=host[0], num_states=host[1])
            self.tier = HostTier(self.memory.supply, slots, self.store, min_saving=policy.min_saving)
            self.memory.attach_tier(self.tier)
        self.residency = Residency(
            self.memory.supply, self.memory.table, enabled=True, policy=policy, tier=self.memory.tier
        )
        self.scheduler = Scheduler(self.residency, max_num_seqs=num_seqs, max_num_batched_tokens=budget)
        runner: Any = self.runner
        self.launcher = None if overlap is None else launcher_of(overlap, self.runner)
        self.engine = Engine(
            self.scheduler,
            runner,
            self.memory,
            tokenizer=None,
            debug_checks=False,
            launcher=self.launcher,
            overlaps=overlap is not None,
        )
        self.groups: dict[str, RequestGroup] = {}
        self.finished: set[str] = set()
        self._max_len = max_len
        self._factory = RequestFactory(None, max_model_len=max_len, eos_token_ids=frozenset(), seed=0)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        num_samples: int = 1,
        hints: Sequence[int] = (),
        priority: int = 0,
        is_warmup: bool = False,
        stops: Sequence[int] = (),
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens, n=num_samples, checkpoint_positions=hints, stop_token_ids=list(stops)
        )
        self.groups[request_id] = self._factory.new_group(
            request_id, Prompt(tuple(prompt), None), params, priority, is_prefill_only=is_warmup
        )
        self.engine.add(self.groups[request_id])

    def step(self, *, check: bool = True) -> None:
        """One step, with every slot that nobody owns overwritten before it, and perhaps all checks after it."""
        if self.tier is not None and self.store is not None:
            poison_free_slots(self.tier, self.store)
        self.engine.step()
        while self.engine.progressed:
            _, group = self.engine.progressed.popitem()
            if group.finished:
                assert group.request_id not in self.finished, "delivered twice"
                self.finished.add(group.request_id)
        if check:
            self.check()

    def check(self) -> None:
        """Each slot has one owner, and holds what it is said to hold."""
        self.engine.check()
        self.runner.check_tree()
        if self.tier is not None and self.store is not None:
            check_contents(self.tier.host.cache, self.store.kv, self.store.states)

    def run(self, max_steps: int = 500) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                return
            self.step()
        raise AssertionError(f"not at an end after {max_steps} steps")

    def assert_all_ended(self) -> None:
        """All requests were delivered, nothing is owned, and the cache can be emptied."""
        assert self.finished == set(self.groups)
        assert not self.engine.in_flight
        assert not self.scheduler.running
        assert not len(self.scheduler.waiting)
        self.check()
        self.memory.reset_cache()  # refuses while any lock is held
        assert self.memory.supply.kv.num_free == self.memory.supply.kv.num_slots
        assert self.memory.supply.states.num_free == self.memory.supply.states.num_slots

    def samples(self, request_id: str) -> tuple[CompletionOutput, ...]:
        return self.groups[request_id].output().outputs

    def assert_tokens(self, request_id: str, *, may_end: str | None = None) -> None:
        """Each sample has the tokens that it has alone: all of them, or the first ones if it ended as it may."""
        group = self.groups[request_id]
        for sample in self.samples(request_id):
            expected = tokens_alone(group, sample.index, max_len=self._max_len)
            if sample.finish_reason not in ("length", "stop"):
                assert sample.finish_reason == may_end, (request_id, sample)
                expected = expected[: len(sample.token_ids)]
            assert list(sample.token_ids) == expected, (request_id, sample)


def tokens_alone(group: RequestGroup, sample_index: int, *, max_len: int) -> list[int]:
    """What a sample's output would be if nothing else ever ran."""
    request, prompt = group.requests[sample_index], group.prompt.token_ids
    if request.is_prefill_only:
        return []
    assert request.params.max_tokens is not None
    tokens, limit = list(prompt), min(max_len, len(prompt) + request.params.max_tokens)
    stops = request.params.stop_token_ids or ()
    while len(tokens) < limit and (len(tokens) == len(prompt) or tokens[-1] not in stops):
        tokens.append(next_token(content(tokens), sample_index))
    return tokens[len(prompt) :]

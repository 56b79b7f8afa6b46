"""The real engine, scheduler, cache and pools' bookkeeping against random users, with a hash for a model.

Every forward checks all it reads, after every step every slot has one owner and the tree's content is right, and in the
end every request has the tokens that it has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.config import EVICTION_POLICIES, RuntimeConfig
from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.engine.launching import DirectLauncher
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.request_factory import RequestFactory
from hybrid_runtime.engine.request_group import Prompt, RequestGroup
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.plan import plan_memory
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.host_tier import HostTier
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.scheduling.scheduler import Scheduler
from hybrid_runtime.scheduling.supply import SlotSupply
from tests.engine.hashing_engine import tokens_alone
from tests.engine.hashing_launchers import OverlapKind, launcher_of
from tests.engine.hashing_runner import NUM_TOKENS, HashingRunner
from tests.engine.hashing_store import HashingStore

MAX_LEN = 16


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, RequestGroup] = {}
        self.aborted: set[str] = set()
        self.finished: set[str] = set()
        self.num_faults = 0

    @initialize(
        num_kv=st.integers(MAX_LEN, 3 * MAX_LEN),
        num_states=st.integers(1, 7),
        num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        enabled=st.sampled_from([True, True, True, False]),
        eviction=st.sampled_from(EVICTION_POLICIES),
        host=st.none() | st.tuples(st.integers(1, 3 * MAX_LEN), st.integers(1, 6)),
        placement=st.builds(
            CheckpointPolicy,
            min_saving=st.integers(1, 4),
            checkpoint_interval=st.none() | st.integers(1, 5),
            track_interval=st.none() | st.integers(1, 4),
            num_track_slots=st.integers(1, 2),
        ),
        overlap=st.sampled_from([None, "late", "thread"]),
    )
    def build(
        self,
        num_kv: int,
        num_states: int,
        num_seqs: int,
        budget: int,
        enabled: bool,
        eviction: str,
        host: tuple[int, int] | None,
        placement: CheckpointPolicy,
        overlap: OverlapKind | None = None,
    ) -> None:
        config = RuntimeConfig(
            num_kv_slots=num_kv, num_state_slots=num_states, max_num_seqs=num_seqs, max_model_len=MAX_LEN
        )
        plan = plan_memory(config, (), (), model_max_len=MAX_LEN, available_bytes=1)
        self.memory = EngineMemory(plan, (), (), max_num_seqs=num_seqs, eviction=eviction, device=torch.device("cpu"))
        self.runner = HashingRunner(self.memory)
        if host is not None:
            slots = SlotSupply(SlotAllocator(host[0]), SlotAllocator(host[1]), RadixCache(eviction))
            store = HashingStore(self.runner, num_kv=host[0], num_states=host[1])
            self.memory.attach_tier(HostTier(self.memory.supply, slots, store, min_saving=placement.min_saving))
        residency = Residency(
            self.memory.supply, self.memory.table, enabled=enabled, policy=placement, tier=self.memory.tier
        )
        self.scheduler = Scheduler(residency, max_num_seqs=num_seqs, max_num_batched_tokens=budget)
        self.factory = RequestFactory(None, max_model_len=MAX_LEN, eos_token_ids=frozenset(), seed=0)
        runner: Any = self.runner
        self.launcher = DirectLauncher(runner) if overlap is None else launcher_of(overlap, self.runner)
        self.engine = Engine(
            self.scheduler,
            runner,
            self.memory,
            tokenizer=None,
            debug_checks=True,
            launcher=self.launcher,
            overlaps=overlap is not None,
        )

    @rule(
        fresh=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=MAX_LEN - 1),
        donor=st.integers(0, 20),
        shared=st.integers(0, MAX_LEN),
        max_tokens=st.integers(1, 8),
        num_samples=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        hints=st.sets(st.integers(1, MAX_LEN), max_size=3),
        is_warmup=st.sampled_from([False, False, False, True]),
        stops=st.sampled_from([(), (), (0,), (1, 2)]),
    )
    def add(
        self,
        fresh: list[int],
        donor: int,
        shared: int,
        max_tokens: int,
        num_samples: int,
        priority: int,
        hints: set[int],
        is_warmup: bool,
        stops: tuple[int, ...] = (),
    ) -> None:
        """A new prompt, or one that starts as the tokens of an earlier request, its output included."""
        if self.requests:
            groups = list(self.requests.values())
            earlier = groups[donor % len(groups)].requests[0].tokens[:].tolist()
            fresh = [*earlier[:shared], *fresh][: MAX_LEN - 1]
        request_id = str(len(self.requests))
        positions = [length for length in hints if length <= len(fresh)]
        params = SamplingParams(
            max_tokens=max_tokens, n=num_samples, checkpoint_positions=positions, stop_token_ids=stops
        )
        prompt = Prompt(tuple(fresh), None)
        group = self.factory.new_group(request_id, prompt, params, priority, is_prefill_only=is_warmup)
        self.requests[request_id] = group
        self.engine.add(group)

    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.engine.groups)
    @rule(choice=st.integers(0, 50))
    def abort(self, choice: int) -> None:
        request_id = list(self.engine.groups)[choice % len(self.engine.groups)]
        self.aborted.add(request_id)
        try:
            self.engine.abort(request_id)
        except KeyboardInterrupt:
            self.engine.abort(request_id)
        self._check()

    @precondition(lambda self: self.engine.groups)
    @rule(skip=st.integers(0, 1), error=st.sampled_from([RuntimeError, KeyboardInterrupt]))
    def step_that_raises(self, skip: int, error: type[BaseException]) -> None:
        """The first or second forward of the step raises and leaves half-written states.

        Where steps overlap an interrupt of theirs comes out of a later call.
        """
        calls = iter(range(2))

        def fail(requests: Sequence[Request]) -> None:
            if next(calls) == skip:
                self.num_faults += 1
                raise error("planted")

        self.runner.before_forward = fail
        self._step()
        self.runner.before_forward = lambda requests: None

    @precondition(lambda self: self.engine.groups)
    @rule(choice=st.integers(0, 50))
    def step_with_nan(self, choice: int) -> None:
        request_id = list(self.engine.groups)[choice % len(self.engine.groups)]
        self.runner.is_invalid = lambda request: request.request_id == request_id
        self.num_faults += 1
        self._step()
        self.runner.is_invalid = lambda request: False

    @precondition(lambda self: not self.scheduler.running)
    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()
        self._check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self._step()
        assert not self.engine.has_unfinished, "the engine does not come to an end"
        assert self.finished == set(self.requests)
        assert not self.scheduler.running
        assert not len(self.scheduler.waiting)
        for request_id, group in self.requests.items():
            self._check_tokens(request_id, group)
        self.launcher.close()
        self.memory.reset_cache()  # refuses if a lock is left
        assert self.memory.supply.kv.num_free == self.memory.supply.kv.num_slots
        assert self.memory.supply.states.num_free == self.memory.supply.states.num_slots

    def _step(self) -> None:
        try:
            self.engine.step()
        except KeyboardInterrupt:
            assert self.num_faults
            self.engine.settle()
        while self.engine.progressed:
            _, group = self.engine.progressed.popitem()
            if group.finished:
                assert group.request_id not in self.finished, "delivered twice"
                self.finished.add(group.request_id)
        self._check()

    def _check(self) -> None:
        self.engine.check()
        self.runner.check_tree()

    def _check_tokens(self, request_id: str, group: RequestGroup) -> None:
        for sample in group.output().outputs:
            expected = tokens_alone(group, sample.index, max_len=MAX_LEN)
            if sample.finish_reason in ("length", "stop"):
                assert list(sample.token_ids) == expected
            else:
                assert (sample.finish_reason == "abort" and request_id in self.aborted) or (
                    sample.finish_reason == "error" and self.num_faults
                )
                assert list(sample.token_ids) == expected[: len(sample.token_ids)]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=max(200, settings().max_examples))

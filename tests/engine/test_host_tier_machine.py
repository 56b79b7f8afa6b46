"""Random users of an engine whose pools have a second tier behind them, with a hash for a model.

Beside what the engine machine checks, after every step the host's slots are each owned once, its tree is sound and
unlocked, and every slot in it holds the right content.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from hybrid_runtime.config import EVICTION_POLICIES
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from tests.engine.hashing_store import attach_hashing_tier, check_contents, poison_free_slots
from tests.engine.test_engine_machine import MAX_LEN, EngineMachine


class TieredMachine(EngineMachine):
    """The engine machine's users and faults, and a store that fails or is interrupted in the middle of a copy."""

    @initialize(
        num_kv=st.integers(MAX_LEN, 2 * MAX_LEN),
        num_states=st.integers(1, 4),
        num_seqs=st.integers(1, 3),
        budget=st.integers(1, 20),
        host_kv=st.integers(1, 4 * MAX_LEN),
        host_states=st.integers(1, 10),
        min_saving=st.integers(1, 3),
        eviction=st.sampled_from(EVICTION_POLICIES),
        placement=st.builds(CheckpointPolicy, st.integers(1, 4), st.none() | st.integers(1, 5), st.none()),
        overlap=st.sampled_from([None, "late", "thread"]),
    )
    def build(self, host_kv: int, host_states: int, min_saving: int, **options: Any) -> None:
        super().build(enabled=True, host=None, **options)
        self.tier, self.store = attach_hashing_tier(
            self.runner, num_kv=host_kv, num_states=host_states, min_saving=min_saving
        )
        self.scheduler.residency.tier = self.tier
        self.tier.before_restore = self.launcher.finish

    @precondition(lambda self: self.requests)
    @rule(donor=st.integers(0, 20), cut=st.integers(0, 3), count=st.integers(1, 4))
    def ask_again(self, donor: int, cut: int, count: int) -> None:
        """An earlier request's tokens, perhaps without its last ones, as a prompt that runs at once."""
        groups = list(self.requests.values())
        tokens = groups[donor % len(groups)].requests[0].tokens[:].tolist()
        self.add(tokens[: max(1, len(tokens) - cut)], 0, 0, count, 1, 0, set(), False)
        self.steps(count)

    @precondition(lambda self: self.engine.groups)
    @rule(direction=st.sampled_from(["save", "restore"]))
    def steps_with_failing_copies(self, direction: str) -> None:
        failures_before, num_failures = self.tier.counts.num_failures, 0

        def fail(actual: str) -> None:
            nonlocal num_failures
            if actual == direction:
                num_failures += 1
                raise OSError("planted")

        self.store.before_copy = fail
        for _ in range(3):
            self._step()
        self.store.before_copy = lambda direction: None
        assert self.tier.counts.num_failures == failures_before + num_failures

    @precondition(lambda self: self.engine.groups)
    @rule()
    def step_with_interrupted_copy(self) -> None:
        def interrupt(direction: str) -> None:
            self.num_faults += 1
            raise KeyboardInterrupt

        self.store.before_copy = interrupt
        self._step()
        self.store.before_copy = lambda direction: None
        self._step()

    def _step(self) -> None:
        poison_free_slots(self.tier, self.store)
        super()._step()

    def _check(self) -> None:
        super()._check()
        check_contents(self.tier.host.cache, self.store.kv, self.store.states)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=max(200, settings().max_examples))

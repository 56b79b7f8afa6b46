"""A whole runtime on a small real model against random users: every token as in a run without a cache, every slot owned
once after every step, and in the end every cached state and KV as if computed anew.

Prompts are made of few tokens and of pieces of earlier requests, pools are tiny, unowned slots hold NaN. So chunks,
preemptions, evictions, shared batches and the second tier come about by themselves.
"""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybrid_runtime import HybridRuntime
from hybrid_runtime.config import EVICTION_POLICIES
from tests.engine.cache_content import assert_content
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, poison_free_slots, runtime_of

MAX_LEN = 24
TOKENS = (3, 4, 5)


@cache
def _uncached(kind: str) -> HybridRuntime:
    return runtime_of(kind, enable_prefix_cache=False, max_num_seqs=1, max_model_len=MAX_LEN)


@cache
def expected_tokens(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """All tokens that follow a prompt, computed alone and without a cache."""
    return _uncached(kind).generate(list(prompt), greedy(MAX_LEN))[0].outputs[0].token_ids


class ModelMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.max_tokens: dict[str, int] = {}
        self.finished: set[str] = set()
        self.aborted: set[str] = set()

    @initialize(
        kind=st.sampled_from(sorted(MIXER_KINDS)),
        num_kv=st.integers(MAX_LEN, 3 * MAX_LEN),
        num_states=st.integers(1, 8),
        num_seqs=st.integers(1, 4),
        budget=st.integers(2, 32),
        eviction=st.sampled_from(EVICTION_POLICIES),
        checkpoint_interval=st.none() | st.integers(2, 6),
        track_interval=st.none() | st.integers(1, 5),
        min_saving=st.integers(1, 4),
        host_slots=st.sampled_from([0, 0, 40, 120]),
    )
    def build(self, kind, num_kv, num_states, num_seqs, budget, host_slots, **options) -> None:
        self.kind = kind
        self.rt = runtime_of(
            kind,
            num_kv_slots=num_kv,
            num_state_slots=num_states,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            host_cache_bytes=host_slots * _uncached(kind).plan.kv_slot_bytes
            + host_slots // 8 * _uncached(kind).plan.state_slot_bytes,
            **options,
        )

    @rule(
        fresh=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=MAX_LEN - 8),
        donor=st.integers(0, 20),
        shared=st.integers(0, MAX_LEN),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
        hints=st.sets(st.integers(1, MAX_LEN), max_size=2),
    )
    def add(self, fresh, donor, shared, max_tokens, priority, hints) -> None:
        """A new prompt, or one that starts as an earlier request did, its answer included."""
        if self.prompts:
            earlier = list(self.prompts.values())[donor % len(self.prompts)]
            fresh = [*(earlier + expected_tokens(self.kind, earlier))[:shared], *fresh][: MAX_LEN - 1]
        params = greedy(max_tokens, checkpoint_positions=[length for length in hints if length <= len(fresh)])
        request_id = self.rt.add_request(fresh, params, priority=priority)
        self.prompts[request_id] = tuple(fresh)
        self.max_tokens[request_id] = max_tokens

    @rule(count=st.integers(1, 6))
    def steps(self, count) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: len(self.finished) < len(self.prompts))
    @rule(choice=st.integers(0, 20))
    def abort(self, choice) -> None:
        unfinished = [request_id for request_id in self.prompts if request_id not in self.finished]
        self.aborted.add(unfinished[choice % len(unfinished)])
        self.rt.abort(unfinished[choice % len(unfinished)])

    @rule(prompt=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=MAX_LEN - 1))
    def warmup(self, prompt) -> None:
        self.rt.warmup(prompt)

    @precondition(lambda self: not self.rt.has_unfinished)
    @rule()
    def reset(self) -> None:
        self.rt.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "rt"):
            return
        while self.rt.has_unfinished:
            self._step()
        assert self.finished == set(self.prompts)
        assert_content(self.rt)
        assert_idle(self.rt)
        self.rt.close()

    def _step(self) -> None:
        poison_free_slots(self.rt)
        for output in self.rt.step():
            if output.finished:
                self._check(output.request_id, output.outputs[0].token_ids, output.outputs[0].finish_reason)

    def _check(self, request_id, token_ids, finish_reason) -> None:
        assert request_id not in self.finished
        self.finished.add(request_id)
        expected = expected_tokens(self.kind, self.prompts[request_id])[: self.max_tokens[request_id]]
        if request_id in self.aborted and finish_reason == "abort":
            assert token_ids == expected[: len(token_ids)]
        else:
            assert finish_reason == "length"
            assert token_ids == expected


TestModelMachine = ModelMachine.TestCase
# A forward of a real model costs milliseconds: the quick profile runs few examples, and none has many rules.
TestModelMachine.settings = settings(
    max_examples=20 if settings().max_examples < 1000 else settings().max_examples, stateful_step_count=20
)

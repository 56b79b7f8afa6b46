"""Random drafts, pools, batches and users: tokens as of plain decoding, each slot with one owner, a right cache.

Kept out of reach of the quick profile's number of examples: each builds a runtime and runs a real model.
"""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from hybrid_runtime.config import EVICTION_POLICIES
from tests.engine.cache_content import assert_content
from tests.engine.helpers import MIXER_KINDS, assert_idle, runtime_of
from tests.engine.test_model_machine import MAX_LEN, ModelMachine, _uncached, expected_tokens
from tests.parity.zoo import CASES
from tests.speculative.scripted_drafter import CHAIN, KINDS, TREE, ScriptedDrafter
from tests.speculative.speculative_runs import (
    MIXED,
    ROLLBACKS,
    config,
    outcomes,
    plain,
    random_prompts,
    speculating,
    texts_of,
)

LONG_RUN = 1000  # examples that the long profile runs of each
IS_LONG = settings().max_examples >= LONG_RUN

_plain_runtime = cache(plain)


@cache
def expected(name: str, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    """Computed alone."""
    return _plain_runtime(name, max_model_len=40).generate(list(prompt), params)[0]


@settings(max_examples=LONG_RUN if IS_LONG else 10)
@given(
    name=st.sampled_from([case.name for case in CASES]),
    rollback=st.sampled_from(ROLLBACKS),
    num_nodes=st.integers(2, 24),
    shape=st.sampled_from([CHAIN, TREE]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    adaptive=st.booleans(),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    num_shared=st.integers(0, 10),
    seed=st.integers(0, 10**6),
    options=st.fixed_dictionaries(
        {
            "num_kv_slots": st.integers(40, 120),
            "num_state_slots": st.integers(1, 10),
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(2, 40),
            "track_interval": st.none() | st.integers(1, 6),
            "min_saving": st.integers(1, 4),
            "enable_prefix_cache": st.sampled_from([True, True, False]),
        }
    ),
)
def test_texts_are_those_of_plain_decoding(
    name, rollback, num_nodes, shape, kinds, adaptive, lengths, num_shared, seed, options
) -> None:
    """Twice, so that the second run resumes from what the first left."""
    shared, *prompts = random_prompts(seed, [num_shared, *lengths])
    prompts = [[*shared, *prompt] for prompt in prompts]
    params = [MIXED[(seed + place) % len(MIXED)] for place in range(len(prompts))]
    truth = [expected(name, tuple(prompt), each) for prompt, each in zip(prompts, params, strict=True)]
    drafter = ScriptedDrafter(texts_of(truth), seed=seed, shape=shape, kinds=kinds)
    speculative = config(rollback, num_nodes=num_nodes, adaptive=adaptive)
    with speculating(name, drafter, speculative=speculative, max_model_len=40, **options) as rt:
        for _ in range(2):
            assert outcomes(rt.generate(prompts, params)) == outcomes(truth)
        assert_content(rt)
        assert_idle(rt)


class SpeculativeMachine(ModelMachine):
    """The machine of the plain runtime's test, whose random users come to a runtime that speculates."""

    @initialize(
        kind=st.sampled_from(sorted(MIXER_KINDS)),
        num_kv=st.integers(MAX_LEN, 3 * MAX_LEN),
        num_states=st.integers(1, 8),
        num_seqs=st.integers(1, 4),
        budget=st.integers(2, 32),
        rollback=st.sampled_from(ROLLBACKS),
        num_nodes=st.integers(2, 12),
        shape=st.sampled_from([CHAIN, TREE]),
        seed=st.integers(0, 10**6),
        adaptive=st.booleans(),
        eviction=st.sampled_from(EVICTION_POLICIES),
        track_interval=st.none() | st.integers(1, 5),
        host_slots=st.sampled_from([0, 0, 40, 120]),
    )
    def build(
        self,
        kind,
        num_kv,
        num_states,
        num_seqs,
        budget,
        rollback,
        num_nodes,
        shape,
        seed,
        adaptive,
        host_slots,
        **options,
    ) -> None:
        self.kind = kind
        self.drafter = ScriptedDrafter([], seed=seed, shape=shape)
        plan = _uncached(kind).plan
        self.rt: HybridRuntime = runtime_of(
            kind,
            num_kv_slots=num_kv,
            num_state_slots=num_states,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            min_saving=2,
            speculative=config(rollback, num_nodes=num_nodes, adaptive=adaptive),
            drafter=self.drafter,
            host_cache_bytes=host_slots * plan.kv_slot_bytes + host_slots // 8 * plan.state_slot_bytes,
            **options,
        )
        self.num_learnt = 0

    def _step(self) -> None:
        for prompt in list(self.prompts.values())[self.num_learnt :]:
            self.drafter.learn([*prompt, *expected_tokens(self.kind, prompt)])
        self.num_learnt = len(self.prompts)
        super()._step()


TestSpeculativeMachine = SpeculativeMachine.TestCase
TestSpeculativeMachine.settings = settings(max_examples=LONG_RUN if IS_LONG else 12, stateful_step_count=20)

"""Runtimes that speculate, and plain ones with the same model in float64 to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams, SpeculativeConfig
from hybrid_runtime.speculative.draft import Drafter
from tests.parity.zoo import CASES
from tests.speculative.scripted_drafter import ScriptedDrafter

ROLLBACKS = ("fold", "snapshot", "replay")
KINDS = ("kimi", "granite-moe-rope", "qwen-sparse-steps")  # of each recurrent mixer one, with attention
TREE_SIZE = 8
ROOMY: dict[str, Any] = {
    "compile": "off",
    "debug_checks": True,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "num_kv_slots": 600,
    "num_state_slots": 40,
    "track_interval": 4,
    "min_saving": 2,
}
TIGHT: dict[str, Any] = {**ROOMY, "max_model_len": 40, "num_kv_slots": 52, "num_state_slots": 6, "max_num_seqs": 4}
"""Of which requests preempt each other, and evict what is cached."""


@cache
def wide_model(name: str) -> PreTrainedModel:
    """A model of the zoo in float64; shared by all tests, which must not change it."""
    return next(case for case in CASES if case.name == name).build().double()


def plain(name: str, **options: Any) -> HybridRuntime:
    """Tokens one by one, and nothing cached."""
    return HybridRuntime(wide_model(name), **{**ROOMY, "enable_prefix_cache": False, **options})


def speculating(
    name: str, drafter: Drafter | None, rollback: str = "fold", *, adaptive: bool = False, **options: Any
) -> HybridRuntime:
    return HybridRuntime(
        wide_model(name), drafter=drafter, **{**ROOMY, "speculative": config(rollback, adaptive=adaptive), **options}
    )


def config(rollback: str = "fold", *, num_nodes: int = TREE_SIZE, adaptive: bool = False) -> SpeculativeConfig:
    """Any tree of up to `num_nodes` nodes, chains too: a drafter that its user brings is held to nothing else."""
    return SpeculativeConfig(
        "ngram", num_steps=num_nodes - 1, topk=2, num_draft_tokens=num_nodes, rollback=rollback, adaptive=adaptive
    )


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 100, size=length).tolist() for length in lengths]


def texts_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Prompt and output of every sample."""
    return [[*output.prompt_token_ids, *sample.token_ids] for output in outputs for sample in output.outputs]


def outcomes(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All that a user sees of how each sample ended, but for its logprobs."""
    return [
        [(s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs]
        for output in sorted(outputs, key=lambda output: output.prompt_token_ids)
    ]


def scripted(outputs: Sequence[RequestOutput], **options: Any) -> ScriptedDrafter:
    """A drafter that knows these outputs."""
    return ScriptedDrafter(texts_of(outputs), **options)


def num_accepted(rt: HybridRuntime) -> int:
    speculation = rt.stats().speculation
    assert speculation is not None
    return speculation.num_accepted_tokens


MIXED: tuple[SamplingParams, ...] = (
    SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.9, seed=7, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=15, temperature=0.8, seed=3, presence_penalty=0.4, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.0, repetition_penalty=1.3, min_tokens=3, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=1.1, seed=9, top_k=20, min_p=0.01, ignore_eos=True),
)
"""Of a batch whose rows choose their tokens in different ways, with a prompt for each of `MIXED_LENGTHS`."""
MIXED_LENGTHS = (5, 11, 1, 8, 3)

"""Runtimes over small random models, and what must hold of them at the end of every test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.parity.zoo import CASES

MIXER_KINDS = {"kda": "kimi", "mamba2": "granite-moe-rope", "gdn": "qwen-sparse-steps"}
"""A model of the zoo for each kind of recurrent mixer; all have attention and experts too."""

VOCAB_SIZE = 150  # the least of the models' vocabularies


@cache
def model_of(kind: str) -> PreTrainedModel:
    """The model of a mixer kind, in float32; shared by all tests, which must not change it."""
    return next(case for case in CASES if case.name == MIXER_KINDS[kind]).build()


def runtime_of(kind: str, **options: Any) -> HybridRuntime:
    """An all-float64 runtime that checks its pools after every step."""
    defaults: dict[str, Any] = {
        "dtype": "float64",
        "state_dtype": "float64",
        "debug_checks": True,
        "compile": "off",
        "max_num_seqs": 8,
        "num_kv_slots": 2000,
        "num_state_slots": 60,
    }
    return HybridRuntime(model_of(kind), **{**defaults, **options})


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(3, VOCAB_SIZE, size=length)]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """The token ids of the first sample of each output, which must have ended regularly."""
    assert all(sample.finish_reason in ("length", "stop") for output in outputs for sample in output.outputs)
    return [output.outputs[0].token_ids for output in outputs]


def solo_tokens(kind: str, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """What each prompt gives alone, in a runtime without prefix cache and with room for everything."""
    with runtime_of(kind, enable_prefix_cache=False, max_num_seqs=1) as rt:
        return [
            tokens_of(rt.generate(list(prompt), greedy(count)))[0]
            for prompt, count in zip(prompts, max_tokens, strict=True)
        ]


def assert_idle(rt: HybridRuntime) -> None:
    """Nothing runs: both pools are balanced without requests, no lock is held, every table row is free."""
    memory = rt._engine.memory
    assert not rt._engine.scheduler.running
    assert not len(rt._engine.scheduler.waiting)
    memory.check([])
    assert rt.prefix_cache.num_protected_kv == 0
    assert rt.prefix_cache.num_protected_states == 0
    rt.reset_prefix_cache()  # refuses while any lock is held
    assert memory.supply.kv.num_free == memory.supply.kv.num_slots
    assert memory.supply.states.num_free == memory.supply.states.num_slots


def poison_free_slots(rt: HybridRuntime) -> None:
    """Writes NaN to every slot that nobody owns: reading one would show in the tokens."""
    import torch

    memory = rt._engine.memory
    memory.kv_pool.fill(torch.from_numpy(memory.supply.kv.free_slots().astype(np.int64)), torch.nan)
    memory.state_pool.fill(torch.from_numpy(memory.supply.states.free_slots().astype(np.int64)), torch.nan)

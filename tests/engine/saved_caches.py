"""What the tests of saved prefix caches save, and how they look at what a runtime holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybrid_runtime import HybridRuntime
from tests.cache.helpers import Prefix, state_contents
from tests.engine.helpers import (
    greedy,
    random_tokens,
)


def saved_prompts() -> list[list[int]]:
    """Two groups of three that start with the same 12 tokens, and a short one."""
    rng = np.random.default_rng(11)
    starts = [random_tokens(rng, 12) for _ in range(2)]
    return [[*start, *random_tokens(rng, 6)] for start in starts for _ in range(3)] + [random_tokens(rng, 4)]


def fill(rt: HybridRuntime) -> list[int]:
    """Runs the prompts; returns what each hits when it comes again."""
    prompts = saved_prompts()
    for prompt in prompts:
        rt.generate(prompt, greedy(3))
    return [len(prompt) - 1 for prompt in prompts]


def checkpoints_of(rt: HybridRuntime) -> dict[Prefix, str | None]:
    """Prefix and origin of every checkpoint of the device's tree."""
    return {prefix: origin for prefix, (_, origin) in state_contents(rt._engine.memory.cache).items()}


def everything_in(rt: HybridRuntime) -> Any:
    """The trees with their slots and orders, and the free lists: whatever a failed load must not change."""
    memory = rt._engine.memory
    assert memory.tier is not None
    return [
        [
            [
                (node.length, node.key.tolist(), node.kv_slots.tolist(), node.state_slot, node.origin, node.last_used)
                for node in supply.cache.nodes()
            ],
            sorted(supply.kv.free_slots().tolist()),
            sorted(supply.states.free_slots().tolist()),
        ]
        for supply in (memory.supply, memory.tier.host)
    ]

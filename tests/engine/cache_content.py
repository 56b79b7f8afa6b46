"""What the tree of a runtime holds, and whether it is what computing it from nothing gives."""

from __future__ import annotations

import numpy as np
import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.memory.pools import Pool
from tests.engine.helpers import runtime_of


def states_of(rt: HybridRuntime) -> dict[int, str | None]:
    """Length -> origin of all checkpoints of a tree that has at most one at each length."""
    nodes = [node for node in rt.prefix_cache.nodes() if node.state_slot is not None]
    states = {node.length: node.origin for node in nodes}
    assert len(states) == len(nodes)
    return dict(sorted(states.items()))


def num_computed(rt: HybridRuntime) -> int:
    """Tokens computed since the start, whichever kind of forward did it."""
    stats = rt.stats().scheduler
    return stats.num_prefill_tokens + stats.num_decode_tokens


def num_forwards(rt: HybridRuntime) -> int:
    runner = rt._engine.runner
    return runner.num_prefill_forwards + runner.num_decode_forwards


def assert_content(rt: HybridRuntime, kind: str) -> None:
    """The state and the KV of every cached node are those that one prefill of its tokens gives in another runtime."""
    pools = rt._engine.memory
    with runtime_of(kind, max_num_seqs=1) as fresh:
        fresh_pools = fresh._engine.memory
        for node in rt.prefix_cache.nodes():
            if node.state_slot is None:
                continue
            tokens, kv_slots = rt.prefix_cache.path_tokens(node), rt._engine.memory.cache.path_kv_slots(node)
            fresh.reset_prefix_cache()
            fresh.warmup(tokens.tolist())
            match = fresh.prefix_cache.match(np.append(tokens, np.int32(0)))
            assert match.state_length == node.length
            assert match.state_slot is not None
            _assert_same(pools.kv_pool, kv_slots, fresh_pools.kv_pool, match.kv_slots)
            _assert_same(pools.state_pool, [node.state_slot], fresh_pools.state_pool, [match.state_slot])


def _assert_same(ours: Pool, our_slots: np.ndarray | list, theirs: Pool, their_slots: np.ndarray | list) -> None:
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        assert our_layer.keys() == their_layer.keys()
        for name, tensor in our_layer.items():
            actual = tensor[torch.as_tensor(np.asarray(our_slots, dtype=np.int64))]
            expected = their_layer[name][torch.as_tensor(np.asarray(their_slots, dtype=np.int64))]
            assert actual.dtype == torch.float64
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")  # noqa: B023  # called at once

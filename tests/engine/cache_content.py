"""What the tree of a runtime holds, and whether it is what computing it from nothing gives."""

from __future__ import annotations

import numpy as np
import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.cache.node import Node
from tests.parity.driver import Driver, Prompt

# Rounding in float64 (1.1e-16 a step) grows with the tokens and layers; what belongs to another length is off by parts
# of one. Measured: below 1e-13 of the largest element.
RELATIVE_TOLERANCE = 1e-10


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


def assert_content(rt: HybridRuntime) -> None:
    """The KV and the states of every cached node of an all-float64 runtime are those of one prefill of its tokens."""
    for node in list(rt.prefix_cache.nodes()):
        if not node.children:
            _check_path(rt, node)


def _check_path(rt: HybridRuntime, leaf: Node) -> None:
    memory = rt._engine.memory
    tokens = memory.cache.path_tokens(leaf).tolist()
    states = {node.length: node.state_slot for node in _path(leaf) if node.state_slot is not None}
    driver = Driver(rt.model, max_requests=1, max_len=len(tokens) + 1, num_state_slots=len(states) + 1)
    request = driver.start()
    driver.prefill(Prompt(request, tokens, sorted(states)))
    expected_slots = driver.req_to_token[request.row, : len(tokens)].long()
    kv_slots = torch.from_numpy(memory.cache.path_kv_slots(leaf).astype(np.int64))
    for layer, expected in zip(memory.kv_pool.layers, driver.kv_pool.layers, strict=True):
        for name, tensor in layer.items():
            _assert_close(tensor[kv_slots], expected[name][expected_slots], f"{name} of {tokens}")
    for length, slot in states.items():
        for layer, expected in zip(memory.state_pool.layers, driver.state_pool.layers, strict=True):
            for name, tensor in layer.items():
                _assert_close(
                    tensor[slot], expected[name][request.state_slots[length]], f"{name} after {tokens[:length]}"
                )


def _path(node: Node) -> list[Node]:
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == torch.float64
    error = (actual - expected).abs().max()
    assert error <= RELATIVE_TOLERANCE * max(1.0, float(expected.abs().max())), f"{what}: off by {error}"

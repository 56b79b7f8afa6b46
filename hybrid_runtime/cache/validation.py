"""What the prefix cache refuses, checked before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_runtime.cache.node import TokenArray
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.cache.tree import Walk
from hybrid_runtime.memory.slots import SlotArray

_INT32 = np.dtype(np.int32)


def require_int32_vector(name: str, array: np.ndarray) -> None:
    if array.dtype != _INT32 or array.ndim != 1:
        raise ValueError(f"{name} must be an int32 vector, got {array.dtype} of shape {array.shape}")


def require_count(n: int) -> None:
    if n < 0:
        raise ValueError(f"cannot evict {n} slots")


def deepest_length(
    tokens: TokenArray, kv_slots: SlotArray, checkpoints: Sequence[Checkpoint], protected_length: int
) -> int:
    """Length of the deepest checkpoint (0 if there is none) of an insert whose arguments fit together."""
    require_int32_vector("tokens", tokens)
    require_int32_vector("kv_slots", kv_slots)
    num_tokens = len(tokens)
    kv_length = 0
    for checkpoint in checkpoints:
        if not 1 <= checkpoint.length <= num_tokens:
            raise ValueError(f"checkpoint length {checkpoint.length} outside 1..{num_tokens} tokens")
        if checkpoint.state_slot < 1:
            raise ValueError(f"{checkpoint} has no state slot")
        kv_length = max(kv_length, checkpoint.length)
    if len({checkpoint.state_slot for checkpoint in checkpoints}) < len(checkpoints):
        raise ValueError(f"one state slot in several checkpoints: {list(checkpoints)}")
    if kv_length > len(kv_slots):
        raise ValueError(f"{len(kv_slots)} KV slots do not reach the checkpoint at length {kv_length}")
    if not 0 <= protected_length <= num_tokens:
        raise ValueError(f"protected_length {protected_length} outside 0..{num_tokens} tokens")
    # Those below are compared with the tree's own, which are none of them null.
    own = kv_slots[protected_length:kv_length]
    if len(own) and own.min() < 1:
        raise ValueError(f"a null slot among the KV slots of the first {kv_length} tokens")
    return kv_length


def require_disjoint(
    walk: Walk, own_kv_slots: SlotArray, kv_slots: SlotArray, checkpoints: Sequence[Checkpoint], protected_length: int
) -> None:
    """Refuses an insert whose slots would come to have two owners.

    `own_kv_slots` are the tree's for the `walk.length` tokens it has already, `kv_slots` the caller's for all tokens.
    """
    if protected_length > walk.length:
        raise ValueError(f"{protected_length} tokens are protected, but only {walk.length} are in the tree")
    if own_kv_slots[:protected_length].tobytes() != kv_slots[:protected_length].tobytes():
        raise ValueError(f"the KV slots of the first {protected_length} tokens are not the tree's own")
    duplicates = kv_slots[protected_length : walk.length]
    if len(duplicates) and (own_kv_slots[protected_length:] == duplicates).any():
        raise ValueError(f"KV slots past the first {protected_length} tokens are the tree's own: protect them")
    given = {(checkpoint.length, checkpoint.state_slot) for checkpoint in checkpoints}
    for node in walk.nodes:
        if (node.length, node.state_slot) in given:
            raise ValueError(f"the checkpoint at length {node.length} is in the tree already: {node}")

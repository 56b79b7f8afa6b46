"""Builds the second tier of the prefix cache in host memory or in a file, beside the pools of the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.available import available_host_bytes
from hybrid_runtime.memory.host_file import FileSlots, HostFile
from hybrid_runtime.memory.host_plan import HostPlan, plan_host_tier
from hybrid_runtime.memory.host_store import MemorySlots, SlotContents, TierPool
from hybrid_runtime.memory.plan import MemoryPlan
from hybrid_runtime.memory.pools import LayerSpec
from hybrid_runtime.memory.slots import SlotArray
from hybrid_runtime.scheduling.host_tier import HostTier, SlotCopy
from hybrid_runtime.scheduling.supply import SlotSupply


class PoolStore:
    """Both pools' contents outside the device; the `HostStore` of a `HostTier`."""

    def __init__(self, kv: TierPool, states: TierPool) -> None:
        self.kv = kv
        self.states = states

    def save(self, copy: SlotCopy) -> None:
        self.kv.save(copy.kv_sources, copy.kv_destinations)
        self.states.save(_one(copy.state_source), _one(copy.state_destination))

    def restore(self, copy: SlotCopy) -> None:
        self.kv.restore(copy.kv_sources, copy.kv_destinations)
        self.states.restore(_one(copy.state_source), _one(copy.state_destination))

    def close(self) -> None:
        self.kv.outside.close()
        self.states.outside.close()


def build_host_tier(
    config: RuntimeConfig,
    plan: MemoryPlan,
    memory: EngineMemory,
    kv_layers: Sequence[LayerSpec],
    state_layers: Sequence[LayerSpec],
) -> HostTier:
    """A tier of `config.host_cache_bytes` behind the pools of `memory`.

    Raises ValueError if it would hold nothing or does not fit, or for a file beside a CUDA device: its reads would
    hold up the stream.
    """
    device = memory.device_table.device
    path = config.host_cache_path
    if path is not None and device.type != "cpu":
        raise ValueError(f"host_cache_path={path!r} is for CPU runtimes, not for one on {device}")
    host_plan = plan_host_tier(config.host_cache_bytes, available_host_bytes() if path is None else None, plan)
    contents = _in_memory if path is None else partial(_in_file, path)
    kv, states = contents(host_plan, kv_layers, state_layers, device)
    store = PoolStore(
        TierPool(memory.kv_pool, kv_layers, kv, device), TierPool(memory.state_pool, state_layers, states, device)
    )
    host = SlotSupply(
        SlotAllocator(host_plan.num_kv_slots), SlotAllocator(host_plan.num_state_slots), RadixCache(config.eviction)
    )
    return HostTier(
        memory.supply,
        host,
        store,
        min_saving=config.min_saving,
        kv_slot_bytes=host_plan.kv_slot_bytes,
        state_slot_bytes=host_plan.state_slot_bytes,
    )


def _in_memory(
    plan: HostPlan, kv_layers: Sequence[LayerSpec], state_layers: Sequence[LayerSpec], device: torch.device
) -> tuple[SlotContents, SlotContents]:
    kv = MemorySlots(kv_layers, plan.num_kv_slots, device)
    try:
        return kv, MemorySlots(state_layers, plan.num_state_slots, device)
    except BaseException:
        kv.close()
        raise


def _in_file(
    path: str | os.PathLike[str],
    plan: HostPlan,
    kv_layers: Sequence[LayerSpec],
    state_layers: Sequence[LayerSpec],
    device: torch.device,
) -> tuple[SlotContents, SlotContents]:
    kv_bytes = plan.num_kv_slots * plan.kv_slot_bytes
    file = HostFile(path, kv_bytes + plan.num_state_slots * plan.state_slot_bytes)
    return FileSlots(kv_layers, file, 0), FileSlots(state_layers, file, kv_bytes)


def _one(slot: int) -> SlotArray:
    return np.array([slot], dtype=np.int32)

"""Everything that holds tokens and states: pools, allocators, request table, prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.engine.ranged_cache import RangedCache
from hybrid_runtime.graphs.step_inputs import StepMemory
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.memory.plan import MemoryPlan
from hybrid_runtime.memory.pools import LayerSpec, Pool
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.memory.request_table import RequestTable, TableEntries
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.scheduling.host_tier import HostTier
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.supply import SlotSupply


class EngineMemory:
    """Allocates what a `MemoryPlan` says, on one device."""

    def __init__(
        self,
        plan: MemoryPlan,
        kv_layers: tuple[LayerSpec, ...],
        state_layers: tuple[LayerSpec, ...],
        *,
        max_num_seqs: int,
        eviction: str,
        device: torch.device,
        table_is_shared: bool | None = None,
        records: RecordPlan | None = None,
    ) -> None:
        """`table_is_shared`: steps read the host's request table itself; None: on a CPU. Not where steps overlap.

        `records`: of a runtime that speculates.
        """
        self.kv_pool = Pool(kv_layers, plan.num_kv_slots, device)
        self.state_pool = Pool(state_layers, plan.num_state_slots, device)
        self.supply = SlotSupply(
            SlotAllocator(plan.num_kv_slots), SlotAllocator(plan.num_state_slots), RangedCache(eviction)
        )
        self.tier: HostTier | None = None
        self.table = RequestTable(max_num_seqs, plan.max_model_len)
        host_table = torch.from_numpy(self.table.slots)
        self.table_is_shared = device.type == "cpu" if table_is_shared is None else table_is_shared
        with torch.inference_mode(False):  # as the pools: writable in either mode
            self.device_table = host_table if self.table_is_shared else host_table.clone().to(device)
        self.record_bytes = 0 if records is None else records.num_bytes
        record_layers = () if records is None else records.allocate(device)
        self.step_memory = StepMemory(self.kv_pool.layers, self.state_pool.layers, self.device_table, record_layers)

    @property
    def cache(self) -> RadixCache:
        return self.supply.cache

    def attach_tier(self, tier: HostTier) -> None:
        """Makes a tier behind the pools, which `supply` evicts to, a part of this memory."""
        self.tier = tier

    def reset_cache(self) -> None:
        """Empties the cache and the tier behind it. Raises ValueError while any lock is held."""
        self.supply.reset_cache()
        if self.tier is not None:
            self.tier.reset()

    def start_over(self) -> None:
        """Declares pools, cache, the tier behind it and request table empty, whoever owned what."""
        self.supply.start_over()
        if self.tier is not None:
            self.tier.start_over()
        self.table.start_over()

    def load_table(self, entries: TableEntries) -> None:
        """Brings what was written to the request table to the device's copy of it."""
        places, slots = torch.from_numpy(entries.places), torch.from_numpy(entries.slots)
        device = self.device_table.device
        self.device_table.view(-1).index_put_((places.to(device),), slots.to(device))

    def free(self) -> None:
        """Gives the pools' memory back; nothing can run afterwards."""
        if self.tier is not None:
            self.tier.close()
        self.kv_pool.free()
        self.state_pool.free()
        self.step_memory = StepMemory((), (), torch.empty(0, 0, dtype=torch.int32))

    def check(self, running: list[Request], in_flight: Sequence[StateSlot] = ()) -> None:
        """Asserts that every slot of both pools has exactly one owner: a free list, the tree, or a running request.

        `in_flight`: the state slots that steps in flight are to write checkpoints to. Valid between steps. O(slots +
        tokens in the tree); raises AssertionError.
        """
        self.cache.check()
        if self.tier is not None:
            self.tier.check()
        kv_owners = [self.supply.kv.free_slots(), self.cache.owned_kv_slots()]
        in_steps = np.array(in_flight, dtype=np.int32)
        state_owners = [self.supply.states.free_slots(), self.cache.owned_state_slots(), in_steps]
        for request in running:
            residence = request.resident
            kv_owners.append(self.table.slots[residence.row, residence.protected_length : residence.num_kv_slots])
            state_owners.append(np.array(residence.state_slots, dtype=np.int32))
        for name, owners, total in (
            ("KV", kv_owners, self.supply.kv.num_slots),
            ("state", state_owners, self.supply.states.num_slots),
        ):
            owned = np.sort(np.concatenate(owners))
            sizes = [len(slots) for slots in owners]
            assert np.array_equal(owned, np.arange(1, total + 1)), (
                f"{name} slots are not each owned once: {sizes[0]} free + {sizes[1]} in the tree + {sizes[2:]} of "
                f"steps and requests, {total} in all"
            )
        assert self.table.num_free_rows + len(running) == len(self.table.slots) - 1, "rows of the table are lost"

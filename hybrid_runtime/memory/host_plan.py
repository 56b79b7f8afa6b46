"""How many slots a second tier of so many bytes has."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_runtime.memory.plan import MemoryPlan

MIN_TOKENS = 16  # a tier that cannot hold a checkpoint of that many tokens is not worth its name


@dataclass(frozen=True)
class HostPlan:
    """Slots of the host tier. The null slots, which take memory but hold nothing, come on top."""

    num_kv_slots: int
    num_state_slots: int
    kv_slot_bytes: int
    state_slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, null slots included."""
        return (self.num_kv_slots + 1) * self.kv_slot_bytes + (self.num_state_slots + 1) * self.state_slot_bytes


def plan_host_tier(host_cache_bytes: int, available_bytes: int | None, device: MemoryPlan) -> HostPlan:
    """Divides the bytes between KV and states as the device's pools are divided, with one state at least.

    `available_bytes` None: not known here. Raises ValueError, with the arithmetic, if there are not that many bytes,
    or if they can't hold a checkpoint of `MIN_TOKENS` tokens.
    """
    kv_bytes, state_bytes = device.kv_slot_bytes, device.state_slot_bytes
    least = 2 * state_bytes + (MIN_TOKENS + 1) * kv_bytes
    if host_cache_bytes < least:
        raise ValueError(
            f"host_cache_bytes={host_cache_bytes:,} cannot hold a checkpoint of {MIN_TOKENS} tokens: {MIN_TOKENS} KV "
            f"slots x {kv_bytes:,} B + 1 state slot x {state_bytes:,} B + null slots = {least:,} B"
        )
    if available_bytes is not None and host_cache_bytes > available_bytes:
        raise ValueError(f"host_cache_bytes={host_cache_bytes:,} is more than the {available_bytes:,} B there are")
    scale = host_cache_bytes / device.num_bytes if device.num_bytes else 1.0
    room = host_cache_bytes - (MIN_TOKENS + 1) * kv_bytes
    num_states = max(1, int((device.num_state_slots + 1) * scale) - 1)
    if state_bytes:
        num_states = min(num_states, room // state_bytes - 1)
    num_kv = max(MIN_TOKENS, int((device.num_kv_slots + 1) * scale) - 1)
    if kv_bytes:
        num_kv = (host_cache_bytes - (num_states + 1) * state_bytes) // kv_bytes - 1
    return HostPlan(num_kv, num_states, kv_bytes, state_bytes)

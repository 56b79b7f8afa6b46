"""One plan sizes both pools, and refuses at start what could not finish a request later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.memory.pools import LayerSpec, bytes_per_slot

KV_SLOTS_PER_STATE = 512  # unless told otherwise, the pools hold one state per that many tokens of KV
NUM_FULL_BATCHES = 8  # and never more KV than that many batches of `max_num_seqs` requests of full length


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the pools and of the request table. The null slots and the padding row come on top."""

    num_kv_slots: int
    num_state_slots: int
    max_model_len: int
    kv_slot_bytes: int
    state_slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of both pools, null slots included."""
        return (self.num_kv_slots + 1) * self.kv_slot_bytes + (self.num_state_slots + 1) * self.state_slot_bytes

    def describe(self) -> str:
        """The arithmetic, for messages."""
        return (
            f"{self.num_kv_slots:,} KV slots x {self.kv_slot_bytes:,} B + {self.num_state_slots:,} state slots x "
            f"{self.state_slot_bytes:,} B + null slots = {self.num_bytes:,} B"
        )


def plan_memory(
    config: RuntimeConfig,
    kv_layers: Sequence[LayerSpec],
    state_layers: Sequence[LayerSpec],
    *,
    model_max_len: int,
    available_bytes: int,
) -> MemoryPlan:
    """Sizes what `config` leaves open, within `config.memory_bytes` or else within `available_bytes`.

    Raises ValueError, with the arithmetic, if the pools cannot hold one request of `max_model_len` tokens, or if
    what is asked for does not fit in memory.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the model's limit of {model_max_len} tokens"
        )
    kv_bytes, state_bytes = bytes_per_slot(kv_layers), bytes_per_slot(state_layers)
    limit = available_bytes if config.memory_bytes is None else config.memory_bytes

    wanted_len = config.max_model_len or min(model_max_len, config.num_kv_slots or model_max_len)
    num_states = config.num_state_slots or _choose_num_states(config, wanted_len, kv_bytes, state_bytes, limit)
    num_kv = config.num_kv_slots or _choose_num_kv(config, wanted_len, kv_bytes, state_bytes * (num_states + 1), limit)
    plan = MemoryPlan(num_kv, num_states, config.max_model_len or min(wanted_len, num_kv), kv_bytes, state_bytes)

    if plan.num_bytes > limit:
        raise ValueError(f"the pools do not fit: {plan.describe()}, but there are {limit:,} B for them")
    if plan.num_kv_slots < plan.max_model_len:
        raise ValueError(
            f"max_model_len={plan.max_model_len} is more than the num_kv_slots={plan.num_kv_slots} that would have to "
            f"hold such a request: {plan.describe()}; there are {limit:,} B for the pools"
        )
    if plan.max_model_len < 2:
        raise ValueError(f"max_model_len={plan.max_model_len} leaves no room for a prompt token and an output token")
    return plan


def _choose_num_states(config: RuntimeConfig, max_len: int, kv_bytes: int, state_bytes: int, limit: int) -> int:
    """One state per `KV_SLOTS_PER_STATE` tokens of KV, two per row at least, within half of the memory."""
    num_kv = config.num_kv_slots
    if num_kv is None:
        affordable = limit // max(1, kv_bytes * KV_SLOTS_PER_STATE + state_bytes) * KV_SLOTS_PER_STATE
        num_kv = min(affordable, max_len * config.max_num_seqs * NUM_FULL_BATCHES)
    wanted = max(2 * config.max_num_seqs, num_kv // KV_SLOTS_PER_STATE)
    return max(1, min(wanted, limit // 2 // state_bytes - 1)) if state_bytes else wanted


def _choose_num_kv(config: RuntimeConfig, max_len: int, kv_bytes: int, states_bytes: int, limit: int) -> int:
    """What is left beside the states, but no more than the rows can use several times over."""
    most = max_len * config.max_num_seqs * NUM_FULL_BATCHES
    return max(1, min(most, (limit - states_bytes) // kv_bytes - 1)) if kv_bytes else most

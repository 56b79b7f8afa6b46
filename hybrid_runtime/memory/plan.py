"""One plan sizes both pools, and refuses at start what could not finish a request later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.memory.pools import LayerSpec, bytes_per_slot

KV_SLOTS_PER_STATE = 512  # unless told otherwise, the pools hold one state per that many tokens of KV
NUM_BATCHES = 8  # and KV for that many batches of `max_num_seqs` requests ...
TYPICAL_LEN = 2048  # ... of that many tokens, if memory allows: more would rarely be hit
MIN_LEN = 2  # a prompt token and an output token
TABLE_ENTRY_BYTES = 4  # of the request table: one entry per row and position
ALLOCATOR_BYTES_PER_SLOT = 5  # an entry of the free list and a flag
FREE_BOOKKEEPING_BYTES = 2**30  # bookkeeping in host memory up to here is granted; beyond, what the pools may take


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the pools and of the request table. The null slots and the padding row come on top."""

    num_kv_slots: int
    num_state_slots: int
    max_model_len: int
    kv_slot_bytes: int
    state_slot_bytes: int
    record_bytes: int = 0  # what verifies of drafts note down, in all

    @property
    def num_bytes(self) -> int:
        """Bytes of both pools, null slots included, and of the records."""
        pools = (self.num_kv_slots + 1) * self.kv_slot_bytes + (self.num_state_slots + 1) * self.state_slot_bytes
        return pools + self.record_bytes

    def describe(self) -> str:
        """The arithmetic, for messages."""
        records = f" + {self.record_bytes:,} B of speculation records" if self.record_bytes else ""
        return (
            f"{self.num_kv_slots:,} KV slots x {self.kv_slot_bytes:,} B + {self.num_state_slots:,} state slots x "
            f"{self.state_slot_bytes:,} B + null slots{records} = {self.num_bytes:,} B"
        )


def plan_memory(
    config: RuntimeConfig,
    kv_layers: Sequence[LayerSpec],
    state_layers: Sequence[LayerSpec],
    *,
    model_max_len: int,
    available_bytes: int,
    record_bytes: int = 0,
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
    most_kv = max(wanted_len, config.max_num_seqs * min(wanted_len, TYPICAL_LEN) * NUM_BATCHES)
    room = limit - record_bytes
    num_states = config.num_state_slots or _choose_num_states(config, most_kv, kv_bytes, state_bytes, room)
    num_kv = config.num_kv_slots or _choose_num_kv(most_kv, kv_bytes, room - state_bytes * (num_states + 1))
    max_len = config.max_model_len or min(wanted_len, num_kv)
    plan = MemoryPlan(num_kv, num_states, max_len, kv_bytes, state_bytes, record_bytes)

    host_bytes = (config.max_num_seqs + 1) * plan.max_model_len * TABLE_ENTRY_BYTES + (
        plan.num_kv_slots + plan.num_state_slots
    ) * ALLOCATOR_BYTES_PER_SLOT
    if host_bytes > max(limit, FREE_BOOKKEEPING_BYTES):
        raise ValueError(
            f"the bookkeeping of max_num_seqs={config.max_num_seqs} rows of max_model_len={plan.max_model_len} tokens, "
            f"num_kv_slots={plan.num_kv_slots} and num_state_slots={plan.num_state_slots} takes {host_bytes:,} B"
        )
    if plan.num_bytes > limit:
        raise ValueError(
            f"the pools do not fit: {plan.describe()}, but there are {limit:,} B for them; raise memory_bytes, or "
            "lower num_kv_slots, num_state_slots, max_model_len or max_num_seqs" + _speculation_hint(record_bytes)
        )
    if plan.num_kv_slots < plan.max_model_len:
        raise ValueError(
            f"max_model_len={plan.max_model_len} is more than the num_kv_slots={plan.num_kv_slots} that would have to "
            f"hold such a request: {plan.describe()}; there are {limit:,} B for the pools"
        )
    if plan.max_model_len < MIN_LEN:
        raise ValueError(f"max_model_len={plan.max_model_len} leaves no room for a prompt token and an output token")
    return plan


def _speculation_hint(record_bytes: int) -> str:
    return ", or num_draft_tokens, or choose rollback='fold'" if record_bytes else ""


def _choose_num_states(config: RuntimeConfig, most_kv: int, kv_bytes: int, state_bytes: int, limit: int) -> int:
    """One state per `KV_SLOTS_PER_STATE` tokens of KV and two per row at least, beside the KV that was asked for."""
    num_kv = config.num_kv_slots
    if num_kv is None:
        affordable = limit // max(1, kv_bytes * KV_SLOTS_PER_STATE + state_bytes) * KV_SLOTS_PER_STATE
        num_kv = min(affordable, most_kv)
    wanted = max(2 * config.max_num_seqs, num_kv // KV_SLOTS_PER_STATE)
    if state_bytes == 0:
        return wanted
    wanted_kv = config.num_kv_slots or config.max_model_len
    room = limit - ((wanted_kv or MIN_LEN) + 1) * kv_bytes
    if wanted_kv is None:
        room = min(room, limit // 2)
    return max(1, min(wanted, room // state_bytes - 1))


def _choose_num_kv(most_kv: int, kv_bytes: int, room: int) -> int:
    """What fits into `room` bytes, but no more than is of use."""
    return max(1, min(most_kv, room // kv_bytes - 1)) if kv_bytes else most_kv

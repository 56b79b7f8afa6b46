"""A snapshot of the counters that the engine's parts keep."""

from __future__ import annotations

from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.outputs import CacheStats, PoolStats, RuntimeStats, SchedulerStats


def collect_stats(engine: Engine) -> RuntimeStats:
    """Valid between steps."""
    scheduler, supply = engine.scheduler, engine.memory.supply
    residency, cache = scheduler.residency, supply.cache
    lookups = residency.lookups
    return RuntimeStats(
        kv=_pool_stats(supply.kv, cache.num_kv_slots),
        state=_pool_stats(supply.states, cache.num_state_slots),
        cache=CacheStats(
            num_requests=lookups.num_requests,
            num_hits=lookups.num_hits,
            num_prompt_tokens=lookups.num_prompt_tokens,
            num_cached_tokens=lookups.num_cached_tokens,
            num_nodes=cache.num_nodes,
            num_checkpoints=cache.num_state_slots,
            hits_by_origin=dict(lookups.hits_by_origin),
            misses_by_reason=dict(lookups.misses_by_reason),
            num_kept_checkpoints=dict(residency.num_kept_checkpoints),
            num_skipped_checkpoints=dict(residency.num_skipped_checkpoints),
            num_evicted_tokens=supply.num_evicted_tokens,
            num_evicted_states=supply.num_evicted_states,
        ),
        scheduler=SchedulerStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_finished=engine.num_finished,
            num_preemptions=scheduler.num_preemptions,
            num_steps=engine.num_steps,
            num_prefill_tokens=engine.num_prefill_tokens,
            num_decode_tokens=engine.num_decode_tokens,
        ),
    )


def _pool_stats(allocator: SlotAllocator, num_cached: int) -> PoolStats:
    return PoolStats(
        total=allocator.num_slots,
        free=allocator.num_free,
        cached=num_cached,
        in_use=allocator.num_slots - allocator.num_free - num_cached,
    )

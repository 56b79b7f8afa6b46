"""A snapshot of the counters that the engine's parts keep."""

from __future__ import annotations

from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.memory.allocator import SlotAllocator
from hybrid_runtime.outputs import (
    CacheStats,
    HostCacheStats,
    PoolStats,
    RuntimeStats,
    SchedulerStats,
    SpeculationStats,
)
from hybrid_runtime.scheduling.drafting import Drafting
from hybrid_runtime.scheduling.host_tier import HostTier


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
            num_finished=engine.delivery.num_finished,
            num_preemptions=scheduler.num_preemptions,
            num_steps=engine.num_steps,
            num_prefill_tokens=engine.num_prefill_tokens,
            num_decode_tokens=engine.num_decode_tokens,
            num_wasted_rows=engine.num_wasted_rows,
        ),
        host_cache=None if engine.memory.tier is None else _host_stats(engine.memory.tier),
        speculation=None if scheduler.drafting is None else _speculation_stats(engine, scheduler.drafting),
    )


def _speculation_stats(engine: Engine, drafting: Drafting) -> SpeculationStats:
    counts = engine.verdicts.counts
    return SpeculationStats(
        num_verified_rows=counts.num_rows,
        num_drafted_tokens=counts.num_drafted_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_failed_drafts=drafting.num_failures,
        num_failed_commits=engine.runner.commits.num_failures,
        record_bytes=engine.memory.record_bytes,
    )


def _host_stats(tier: HostTier) -> HostCacheStats:
    counts = tier.counts
    return HostCacheStats(
        total_bytes=tier.total_bytes,
        used_bytes=tier.used_bytes,
        num_checkpoints=tier.host.cache.num_state_slots,
        num_saved_checkpoints=counts.num_saved_checkpoints,
        num_saved_tokens=counts.num_saved_tokens,
        num_skipped_checkpoints=counts.num_skipped_checkpoints,
        num_restored_checkpoints=counts.num_restored_checkpoints,
        num_restored_tokens=counts.num_restored_tokens,
        num_failures=counts.num_failures,
    )


def _pool_stats(allocator: SlotAllocator, num_cached: int) -> PoolStats:
    return PoolStats(
        total=allocator.num_slots,
        free=allocator.num_free,
        cached=num_cached,
        in_use=allocator.num_slots - allocator.num_free - num_cached,
    )

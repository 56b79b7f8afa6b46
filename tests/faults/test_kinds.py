"""Worked cases of what has gone wrong in other engines: checkpoints at borders, sharing, duplicates, two tiers.

On a hash for a model, which sees every slot that is read, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hybrid_runtime.memory.host_store import MemorySlots, TierPool
from hybrid_runtime.memory.pools import Pool, TensorSpec
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.request import PrefixHit
from tests.engine.hashing_engine import HashingEngine


def roomy(policy: CheckpointPolicy, *, budget: int = 100, host: tuple[int, int] | None = None) -> HashingEngine:
    return HashingEngine(num_kv=300, num_states=60, max_len=60, budget=budget, policy=policy, host=host)


def hit_of(engine: HashingEngine, request_id: str) -> PrefixHit:
    hit = engine.groups[request_id].requests[0].prefix_hit
    assert hit is not None
    return hit


def visit(engine: HashingEngine, request_id: str, prompt: Sequence[int], max_tokens: int = 1) -> PrefixHit:
    """One request from beginning to end."""
    engine.add(request_id, prompt, max_tokens)
    engine.run()
    return hit_of(engine, request_id)


def finish(engine: HashingEngine) -> None:
    engine.run()
    for request_id in engine.groups:
        engine.assert_tokens(request_id)
    engine.assert_all_ended()


def output_of(engine: HashingEngine, request_id: str) -> list[int]:
    return list(engine.samples(request_id)[0].token_ids)


def test_the_third_visitor_hits_all_that_is_shared() -> None:
    engine = roomy(CheckpointPolicy(min_saving=4))
    shared = list(range(10))
    hits = [visit(engine, str(place), [*shared, *range(20 * place, 20 * place + 8)]) for place in (1, 2, 3)]
    assert [hit.num_cached_tokens for hit in hits] == [0, 0, 10]
    assert [hit.num_kv_matched_tokens for hit in hits] == [0, 10, 10]
    assert hits[2].checkpoint_origin == "junction"
    finish(engine)


def test_a_hint_at_the_prompts_length_serves_what_goes_on() -> None:
    engine = roomy(CheckpointPolicy(min_saving=4))
    engine.add("hinted", range(10), 6, hints=(10,))
    engine.run()
    hit = visit(engine, "goes on", [*range(10), 50, 51, 52])
    assert (hit.num_cached_tokens, hit.checkpoint_origin) == (10, "hint")
    finish(engine)


def test_a_prompt_shorter_than_every_interval_hits_again() -> None:
    engine = roomy(CheckpointPolicy(min_saving=4, checkpoint_interval=50, track_interval=50))
    assert visit(engine, "first", range(5)).num_cached_tokens == 0
    again = visit(engine, "again", range(5))
    assert (again.num_cached_tokens, again.checkpoint_origin) == (4, "tail")
    finish(engine)


@pytest.mark.parametrize(("max_tokens", "boundary"), [(4, 6), (8, 9)])
def test_what_parts_ways_inside_an_output_resumes_at_a_boundary(max_tokens: int, boundary: int) -> None:
    """As after a stop string, whose tokens no later prompt has: the end's own state is of no use to it."""
    engine = roomy(CheckpointPolicy(min_saving=4, track_interval=3))
    prompt = [7, 8, 9, 10]
    visit(engine, "first", prompt, max_tokens)
    sequence = [*prompt, *output_of(engine, "first")]
    hit = visit(engine, "next turn", [*sequence[:boundary], 50, 51, 52])
    assert (hit.num_cached_tokens, hit.checkpoint_origin) == (boundary, "track")
    finish(engine)


@pytest.mark.parametrize("num_track_slots", [1, 2])
def test_an_end_at_a_boundary_loses_no_slot(num_track_slots: int) -> None:
    """Ends right before, at and behind boundaries, and one that is the prompt's end."""
    for max_tokens in range(1, 9):
        engine = roomy(CheckpointPolicy(min_saving=4, track_interval=3, num_track_slots=num_track_slots))
        visit(engine, "first", [7, 8, 9], max_tokens)
        finish(engine)


def test_an_abort_amid_a_prefill_leaves_what_was_computed() -> None:
    engine = roomy(CheckpointPolicy(min_saving=4), budget=4)
    engine.add("aborted", range(10), 3)
    engine.step()
    engine.engine.abort("aborted")
    engine.check()
    hit = visit(engine, "again", range(10), 3)
    assert (hit.num_cached_tokens, hit.checkpoint_origin) == (4, "final")
    engine.assert_tokens("again")
    engine.assert_tokens("aborted", may_end="abort")
    engine.assert_all_ended()


def test_of_four_that_arrive_together_three_hit() -> None:
    engine = roomy(CheckpointPolicy(min_saving=4))
    for name in ("a", "b", "c", "d"):
        engine.add(name, [*range(12), ord(name), ord(name)], 2)
    engine.run()
    assert [hit_of(engine, name).num_cached_tokens for name in ("a", "b", "c", "d")] == [0, 12, 12, 12]
    finish(engine)


def test_a_follower_goes_on_when_its_leader_is_gone() -> None:
    """It has not waited for nothing: what the leader had computed is there."""
    engine = roomy(CheckpointPolicy(min_saving=4), budget=4)
    engine.add("leader", range(20), 2)
    engine.add("follower", [*range(16), 50, 51], 2)
    engine.step()
    assert engine.groups["follower"].requests[0].following is not None
    engine.engine.abort("leader")
    engine.run()
    assert hit_of(engine, "follower").num_cached_tokens == 4
    engine.assert_tokens("follower")
    engine.assert_tokens("leader", may_end="abort")
    engine.assert_all_ended()


def test_a_full_hit_runs_the_last_token_once() -> None:
    """Though a state at the prompt's end is there."""
    engine = roomy(CheckpointPolicy(min_saving=4))
    engine.add("hinted", range(10), 3, hints=(10,))
    engine.run()
    assert visit(engine, "again", range(10), 3).num_cached_tokens == 9
    finish(engine)


def test_a_state_is_not_overwritten_before_it_is_copied() -> None:
    """One request resumes from a state; another one, admitted in the same step, brings a state back from the host."""
    engine = HashingEngine(num_kv=100, num_states=3, max_len=30, policy=CheckpointPolicy(min_saving=1), host=(50, 10))
    supply = engine.memory.supply
    visit(engine, "on the host", [60])
    supply.release_states(supply.take_states(3))
    visit(engine, "copied", [40])
    visit(engine, "room", [50])
    engine.add("resumes", [40, 1], 2)
    engine.add("comes back", [60, 1], 2)
    finish(engine)
    assert hit_of(engine, "resumes").num_cached_tokens == 1


def test_a_hit_holds_its_state_only_until_it_is_copied() -> None:
    """Also where the request leaves no checkpoint of its own, with which its lock would move on."""
    engine = roomy(CheckpointPolicy(min_saving=4))
    visit(engine, "first", range(10))
    engine.add("again", range(10), 5)
    engine.step()
    assert hit_of(engine, "again").num_cached_tokens == 9
    assert engine.memory.cache.num_protected_kv == 9
    assert engine.memory.cache.num_protected_states == 0
    finish(engine)


def test_an_admission_that_fails_keeps_no_lock() -> None:
    """The prefix that it matched can go as soon as nobody runs on it."""
    engine = HashingEngine(num_kv=30, num_states=10, max_len=30, policy=CheckpointPolicy(min_saving=4))
    visit(engine, "first", range(8))
    engine.add("runs", range(40, 56), 6)
    engine.step()
    protected = engine.memory.cache.num_protected_kv
    engine.add("waits", range(20), 2)
    engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["waits"]
    assert engine.memory.cache.num_protected_kv == protected
    finish(engine)


def test_more_checkpoints_than_state_slots() -> None:
    """One chunk is to leave six states, and there are slots for two: the other four are skipped and counted."""
    policy = CheckpointPolicy(min_saving=4, checkpoint_interval=2)
    engine = HashingEngine(num_kv=60, num_states=3, max_len=30, policy=policy)
    visit(engine, "first", range(12), 3)
    assert sum(engine.residency.num_skipped_checkpoints.values()) >= 4
    assert visit(engine, "again", range(12), 3).num_cached_tokens == 11
    finish(engine)


def test_two_that_compute_the_same_go_on_with_one_copy() -> None:
    """Where waiting would save too little, both compute the same in one batch, and insert it one after the other."""
    engine = roomy(CheckpointPolicy(min_saving=50))
    for name in ("a", "b"):
        engine.add(name, range(10), 5)
    engine.step()
    assert [hit_of(engine, name).num_cached_tokens for name in ("a", "b")] == [0, 0]
    row_of_a, row_of_b = (engine.groups[name].requests[0].resident.row for name in ("a", "b"))
    slots = engine.memory.table.slots[:, :9]
    assert np.array_equal(slots[row_of_a], slots[row_of_b])
    finish(engine)


def test_a_miss_names_the_pool_that_gave_up_too_much() -> None:
    engine = roomy(CheckpointPolicy(min_saving=50))
    supply = engine.memory.supply
    visit(engine, "first", range(8))
    visit(engine, "goes on", [*range(8), 20, 21])
    supply.release(supply.cache.evict_state(1))  # that of length 7; its KV leads to other states
    assert visit(engine, "again", range(8)).cache_miss_reason == "state_evicted"
    supply.release_kv(supply.take_kv(supply.kv.num_slots))
    assert visit(engine, "once more", range(8)).cache_miss_reason == "kv_evicted"
    finish(engine)


def test_a_reset_empties_both_tiers() -> None:
    engine = roomy(CheckpointPolicy(min_saving=4), host=(100, 20))
    supply, tier = engine.memory.supply, engine.tier
    assert tier is not None
    visit(engine, "first", range(10))
    supply.release_kv(supply.take_kv(supply.kv.num_slots))
    assert tier.host.cache.num_nodes > 0
    engine.memory.reset_cache()
    assert tier.host.cache.num_nodes == 0
    assert visit(engine, "again", range(10)).num_cached_tokens == 0
    finish(engine)


def test_contents_come_back_to_their_own_slots() -> None:
    """Real pools, in slots without any order."""
    layers = [{"k": TensorSpec((2,), torch.float32), "v": TensorSpec((3, 1), torch.float64)}]
    pool = Pool(layers, 12)
    for slot in range(13):
        pool.fill(torch.tensor([slot]), float(slot))
    tier = TierPool(pool, layers, MemorySlots(layers, 5, torch.device("cpu")), torch.device("cpu"))
    tier.save(np.array([5, 2, 7], dtype=np.int32), np.array([1, 4, 3], dtype=np.int32))
    tier.restore(np.array([3, 1, 4], dtype=np.int32), np.array([9, 12, 10], dtype=np.int32))
    for tensor in pool.layers[0].values():
        held = tensor.reshape(13, -1)[:, 0].tolist()
        assert held == [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 2, 11, 5]


def test_a_state_comes_back_from_the_host_behind_the_step_in_flight() -> None:
    """The slots it comes back to were free when that step was prepared, so the step may still read them."""
    engine = HashingEngine(
        num_kv=100, num_states=6, max_len=30, policy=CheckpointPolicy(min_saving=1), host=(50, 10), overlap="late"
    )
    supply = engine.memory.supply
    visit(engine, "on the host", [60, 61])
    supply.release_states(supply.take_states(6))
    engine.add("runs", [40, 41, 42], 12)
    for _ in range(3):
        engine.step()
    assert len(engine.engine.in_flight) == 1
    engine.add("comes back", [60, 61, 1], 2)
    finish(engine)
    assert engine.tier is not None
    assert engine.tier.counts.num_restored_checkpoints == 1

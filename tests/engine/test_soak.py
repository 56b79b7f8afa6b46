"""Hundreds of random requests in pools too small for them: preempted, evicted, aborted, and every token right."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_runtime import RequestOutput
from tests.engine.helpers import assert_idle, greedy, poison_free_slots, random_tokens, runtime_of, solo_tokens


def _draw_prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Lengths 1 to 400, most of them short; many extend, fork or repeat an earlier prompt."""
    prompts: list[list[int]] = []
    for _ in range(count):
        length = int(np.clip(rng.geometric(1 / 45), 1, 400)) if rng.random() < 0.95 else int(rng.integers(200, 401))
        shared: list[int] = []
        if prompts and rng.random() < 0.7:
            donor = prompts[int(rng.integers(max(0, len(prompts) - 40), len(prompts)))]
            shared = donor[: int(rng.integers(1, len(donor) + 1))]
        prompts.append([*shared, *random_tokens(rng, max(0, length - len(shared)))][:400])
    return prompts


@pytest.mark.parametrize(("kind", "count"), [("kda", 500), ("mamba2", 120), ("gdn", 120)])
def test_random_requests_give_the_tokens_of_solo_runs(kind: str, count: int) -> None:
    rng = np.random.default_rng(count)
    prompts = _draw_prompts(rng, count)
    max_tokens = [int(n) for n in rng.integers(1, 17, size=count)]
    expected = solo_tokens(kind, prompts, max_tokens)
    is_aborted = rng.random(count) < 0.1
    finished: dict[str, RequestOutput] = {}
    with runtime_of(kind, num_kv_slots=620, max_model_len=420, num_state_slots=12, max_num_batched_tokens=96) as rt:
        waiting = list(range(count))
        while waiting or rt.has_unfinished:
            for _ in range(int(rng.integers(0, 4))):
                if waiting:
                    index = waiting.pop(0)
                    priority = int(rng.integers(0, 3))
                    rt.add_request(prompts[index], greedy(max_tokens[index]), request_id=str(index), priority=priority)
            finished.update({output.request_id: output for output in rt.step() if output.finished})
            for request_id, group in list(rt._engine.groups.items()):
                if is_aborted[int(request_id)] and rng.random() < 0.2:
                    rt.abort(group.request_id)
            if rng.random() < 0.1:
                poison_free_slots(rt)
        stats = rt.stats()
        assert stats.scheduler.num_finished == len(finished) == count
        assert_idle(rt)

    for index in range(count):
        sample = finished[str(index)].outputs[0]
        if sample.finish_reason == "abort":
            assert is_aborted[index]
            assert sample.token_ids == expected[index][: len(sample.token_ids)]
        else:
            assert (sample.finish_reason, sample.token_ids) == ("length", expected[index])

    # The pools were small enough for everything that can happen to have happened.
    assert stats.scheduler.num_preemptions > 0
    assert stats.cache.num_hits > 0
    assert stats.cache.num_evicted_tokens > 0
    assert stats.cache.num_evicted_states > 0
    assert any(output.outputs[0].finish_reason == "abort" for output in finished.values())

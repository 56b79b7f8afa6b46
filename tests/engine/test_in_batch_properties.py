"""Any prompts that arrive together: each has the tokens that it has alone, and what they share is computed once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.cache_content import num_computed
from tests.engine.helpers import assert_idle, greedy, random_tokens, runtime_of, tokens_of
from tests.engine.loop_helpers import drain


@settings(max_examples=max(8, settings().max_examples // 5))
@given(data=st.data())
def test_any_batch_gives_the_tokens_of_each_alone(data: st.DataObject) -> None:
    """Prompts made of few pieces meet in all ways; pools small enough to preempt and to evict."""
    pieces = [random_tokens(np.random.default_rng(place), 6) for place in range(2)]
    shapes = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=2, max_size=6))
    prompts = [
        [token for place in shape for token in pieces[place]][: data.draw(st.integers(1, 30))] for shape in shapes
    ]
    options = {
        "max_num_batched_tokens": data.draw(st.integers(1, 40)),
        "max_num_seqs": data.draw(st.integers(1, 5)),
        "num_state_slots": data.draw(st.integers(5, 12)),
        "num_kv_slots": data.draw(st.integers(40, 150)),
        "min_saving": data.draw(st.integers(1, 8)),
        "track_interval": data.draw(st.none() | st.integers(1, 4)),
        "max_model_len": 40,
    }
    with runtime_of("mamba2", enable_prefix_cache=False, max_num_seqs=1) as rt:
        expected = tokens_of([rt.generate(prompt, greedy(6))[0] for prompt in prompts])
    with runtime_of("mamba2", **options) as rt:
        ids = [rt.add_request(prompt, greedy(6), priority=data.draw(st.integers(0, 2))) for prompt in prompts]
        delivered = drain(rt)
        assert tokens_of([delivered[request_id][-1] for request_id in ids]) == expected
        cache = rt.stats().cache
        assert cache.num_hits == sum(cache.hits_by_origin.values())
        assert cache.num_requests == cache.num_hits + sum(cache.misses_by_reason.values()) == len(prompts)
        assert_idle(rt)


@settings(max_examples=max(10, settings().max_examples // 5))
@given(data=st.data())
def test_with_room_for_all_no_shared_token_is_computed_twice(data: st.DataObject) -> None:
    """Each request computes what none before it has, and at least its last token.

    A prompt with one token left is past being waited for; that token is all that may be computed again.
    """
    letters = st.lists(st.integers(3, 4), min_size=1, max_size=12)
    prompts = data.draw(st.lists(letters.map(lambda own: [5, 6, *own]), min_size=2, max_size=6))
    with runtime_of("mamba2", min_saving=1, max_num_batched_tokens=data.draw(st.integers(6, 30))) as rt:
        outputs = rt.generate(prompts, greedy(3))
        for place, prompt in enumerate(prompts):
            shared = max((common_length(prompt[:-1], earlier) for earlier in prompts[:place]), default=0)
            assert outputs[place].num_cached_tokens in (shared, shared - 1)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        assert num_computed(rt) - 2 * len(prompts) == sum(map(len, prompts)) - num_cached
        assert_idle(rt)


def common_length(a: list[int], b: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
    )

"""What a request that speculated leaves in the cache: the right tokens, states and KV, at the lengths that it says."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.engine.cache_content import assert_content, states_of
from tests.engine.helpers import assert_idle
from tests.speculative.scripted_drafter import CHAIN, PARTLY, RIGHT, ScriptedDrafter
from tests.speculative.speculative_runs import (
    KINDS,
    ROLLBACKS,
    config,
    plain,
    random_prompts,
    speculating,
    texts_of,
)

[PROMPT] = random_prompts(5, [6])
NUM_TOKENS = 24


class Letters:
    """Decodes each token to a letter of its own."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(0x400 + token_id) for token_id in token_ids)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def run(rt: HybridRuntime, prompt: list[int], max_tokens: int, **options: Any) -> RequestOutput:
    return rt.generate(prompt, greedy(max_tokens, **options))[0]


def rollback_for(name: str, case: int) -> str:
    """One of the three, so that over the models each case meets all of them."""
    return ROLLBACKS[(KINDS.index(name) + case) % len(ROLLBACKS)]


@pytest.fixture(params=KINDS, scope="module")
def truth(request: pytest.FixtureRequest) -> tuple[str, list[int]]:
    """A model, and the prompt with what follows it."""
    with plain(request.param) as rt:
        return request.param, texts_of([run(rt, PROMPT, 2 * NUM_TOKENS)])[0]


@pytest.mark.parametrize("max_tokens", range(9, 18))
def test_who_goes_on_resumes_from_the_end_and_from_the_last_boundary(
    truth: tuple[str, list[int]], max_tokens: int
) -> None:
    """Accepted runs of up to eight tokens end at all places of an interval of five: at its boundary, too."""
    name, text = truth
    rollback = rollback_for(name, max_tokens)
    end = len(PROMPT) + max_tokens - 1
    with speculating(name, ScriptedDrafter([text], kinds=(RIGHT,)), rollback, track_interval=5) as rt:
        run(rt, PROMPT, max_tokens)
        boundary = end - end % 5
        boundaries = {} if boundary in (end, 5) else {boundary: "track"}
        assert states_of(rt) == {len(PROMPT) - 1: "tail", **boundaries, end: "final"}
        output = run(rt, text[: end + 1], 4)
        assert (output.num_cached_tokens, output.checkpoint_origin) == (end, "final")
        assert list(output.outputs[0].token_ids) == text[end + 1 : end + 5]
        if boundaries:
            other = (text[boundary] + 1) % 100
            aside = run(rt, [*text[:boundary], other], 4)
            assert (aside.num_cached_tokens, aside.checkpoint_origin) == (boundary, "track")
            with plain(name) as alone:
                expected = run(alone, [*text[:boundary], other], 4)
            assert aside.outputs[0].token_ids == expected.outputs[0].token_ids
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("num_output", [2, 5, 6, 9])
def test_a_stop_string_inside_an_accepted_run_leaves_what_plain_decoding_leaves(
    truth: tuple[str, list[int]], num_output: int
) -> None:
    """Nothing that was accepted behind it is kept or counted, and the next turn resumes at the stop."""
    name, text = truth
    stop = chr(0x400 + text[len(PROMPT) + num_output - 1])
    num_tokens = text.index(ord(stop) - 0x400, len(PROMPT)) + 1
    turn = [*text[:num_tokens], 3, 4]
    options: dict[str, Any] = {"track_interval": 3, "tokenizer": Letters()}
    with plain(name, enable_prefix_cache=True, **options) as alone:
        run(alone, PROMPT, NUM_TOKENS, stop=[stop])
        expected_states = states_of(alone)
        expected = run(alone, turn, 3)
    rollback, drafter = rollback_for(name, num_output), ScriptedDrafter([text], kinds=(RIGHT,))
    with speculating(name, drafter, rollback, **options) as rt:
        output = run(rt, PROMPT, NUM_TOKENS, stop=[stop])
        assert output.outputs[0].finish_reason == "stop"
        assert list(output.outputs[0].token_ids) == text[len(PROMPT) : num_tokens]
        assert states_of(rt) == expected_states
        speculation = rt.stats().speculation
        assert speculation is not None
        num_delivered = speculation.num_verified_rows + speculation.num_accepted_tokens
        assert num_delivered == num_tokens - len(PROMPT) - 1  # the first is the prefill's
        assert output.metrics.num_accepted_tokens == speculation.num_accepted_tokens
        assert rt.stats().scheduler.num_decode_tokens == num_delivered
        again = run(rt, turn, 3)
        assert again.num_cached_tokens == expected.num_cached_tokens == num_tokens - 1
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_speculation_goes_on_from_what_plain_decoding_left_and_back(
    truth: tuple[str, list[int]], rollback: str
) -> None:
    """Turn by turn, rounds of many kinds between them."""
    name, text = truth
    drafter = ScriptedDrafter([text], seed=3, kinds=(PARTLY,), shape=CHAIN)
    with speculating(name, drafter, rollback, speculative=config(rollback, num_nodes=5)) as rt:
        length = len(PROMPT)
        for count in (3, 1, 8, 2, 5, 7):
            output = run(rt, text[:length], count)
            assert list(output.outputs[0].token_ids) == text[length : length + count]
            assert output.num_cached_tokens == (0 if length == len(PROMPT) else length - 1)
            length += count
        assert_content(rt)
        assert_idle(rt)

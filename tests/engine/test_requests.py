"""add_request, step, abort and generate, alone and between each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hybrid_runtime import RequestOutput, SamplingParams
from tests.engine.loop_helpers import LONG, LONG_PROMPT, OPTIONS, PROMPTS, drain, num_queued, reason_of, token_ids_of

# Requests and steps.


def test_an_idle_step_brings_nothing(rt):
    assert not rt.has_unfinished
    assert rt.step() == []
    assert rt.stats().scheduler.num_steps == 0


def test_steps_deliver_everything_so_far_and_the_end_once(rt, reference):
    ids = [rt.add_request(prompt, **LONG) for prompt in PROMPTS]
    assert len(set(ids)) == len(ids)
    delivered = drain(rt)
    for request_id, prompt, tokens in zip(ids, PROMPTS, reference, strict=True):
        outputs = delivered[request_id]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [token_ids_of(output) for output in outputs] == [tokens[: i + 1] for i in range(len(tokens))]
        assert reason_of(outputs[-1]) == "length"
        assert outputs[-1].prompt_token_ids == tuple(prompt)
    assert rt.stats().scheduler.num_finished == len(PROMPTS)
    assert rt.step() == []


def test_generate_gives_the_same_in_the_order_of_the_prompts(rt, reference):
    outputs = rt.generate(PROMPTS, **LONG)
    assert [token_ids_of(output) for output in outputs] == reference
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    assert all(output.finished for output in outputs)
    assert not rt.has_unfinished


def test_one_set_of_sampling_params_per_prompt(rt, reference):
    lengths = [3, 1, 12, 5]
    outputs = rt.generate(PROMPTS, [SamplingParams(**{**LONG, "max_tokens": length}) for length in lengths])
    assert [token_ids_of(output) for output in outputs] == [
        tokens[:length] for tokens, length in zip(reference, lengths, strict=True)
    ]
    outputs = rt.generate(PROMPTS[:2], [SamplingParams(**LONG), SamplingParams(**LONG)], max_new_tokens=2)
    assert [token_ids_of(output) for output in outputs] == [tokens[:2] for tokens in reference[:2]]


def test_requests_added_before_a_generate_are_delivered_by_the_next_step(rt, reference):
    added = rt.add_request(PROMPTS[0], **LONG)
    unfinished = rt.add_request(PROMPTS[2], **{**LONG, "max_tokens": 60})
    (output,) = rt.generate(PROMPTS[1], **{**LONG, "max_tokens": 20})
    assert token_ids_of(output)[:12] == reference[1]
    assert rt.has_unfinished
    first = {output.request_id: output for output in rt.step()}
    assert set(first) == {added, unfinished}
    assert (token_ids_of(first[added]), first[added].finished) == (reference[0], True)
    assert token_ids_of(first[unfinished])[:12] == reference[2]
    assert not first[unfinished].finished
    rest = drain(rt)
    assert set(rest) == {unfinished}
    assert len(token_ids_of(rest[unfinished][-1])) == 60


def test_everything_that_finished_meanwhile_is_kept_for_the_next_step(rt):
    added = [rt.add_request(prompt, **LONG) for prompt in PROMPTS]
    rt.generate(PROMPTS[0], **{**LONG, "max_tokens": 60})
    assert not num_queued(rt)
    assert rt.has_unfinished
    outputs = rt.step()
    assert sorted(output.request_id for output in outputs) == sorted(added)
    assert all(output.finished for output in outputs)
    assert not rt.has_unfinished


def test_an_id_can_be_used_again_after_its_delivery(rt, reference):
    for prompt, tokens in zip(PROMPTS[:2], reference[:2], strict=True):
        assert rt.add_request(prompt, request_id="mine", **LONG) == "mine"
        assert token_ids_of(drain(rt)["mine"][-1]) == tokens


def test_given_ids_do_not_collide_with_those_that_are_made_up(rt):
    given = [rt.add_request([5 + i], request_id=str(i), max_tokens=1) for i in range(3)]
    made_up = [rt.add_request([9 + i], max_tokens=1) for i in range(3)]
    assert len({*given, *made_up}) == 6
    assert set(drain(rt)) == {*given, *made_up}


def test_a_lower_priority_value_is_served_earlier(make):
    rt = make(max_num_seqs=1)
    for priority in (2, 0, 1, 0):
        rt.add_request(
            [5, 6, 7 + priority], request_id=f"{priority}-{rt.stats().scheduler.num_waiting}", priority=priority
        )
    ended = []
    while rt.has_unfinished:
        ended += [output.request_id for output in rt.step() if output.finished]
    assert ended == ["0-1", "0-3", "1-2", "2-0"]


# Abort.


def test_abort_of_a_queued_request(rt):
    request_id = rt.add_request(PROMPTS[0], **LONG)
    rt.abort(request_id)
    assert num_queued(rt) == 0
    (output,) = rt.step()
    assert (output.request_id, output.finished) == (request_id, True)
    assert (reason_of(output), token_ids_of(output)) == ("abort", ())
    assert not rt.has_unfinished


@pytest.mark.parametrize("num_steps", [1, 2, 4, 7])
def test_abort_of_a_running_request_delivers_one_end_and_keeps_the_others(rt, reference, num_steps):
    other = rt.add_request(PROMPTS[0], **LONG)
    aborted = rt.add_request(LONG_PROMPT, **LONG)
    seen = [output for _ in range(num_steps) for output in rt.step() if output.request_id == aborted]
    rt.abort(aborted)
    rt.abort(aborted)  # the second changes nothing
    delivered = drain(rt)
    (end,) = delivered[aborted]
    assert (end.finished, reason_of(end)) == (True, "abort")
    assert token_ids_of(end) == (token_ids_of(seen[-1]) if seen else ())
    assert token_ids_of(delivered[other][-1]) == reference[0]
    assert rt.stats().scheduler.num_finished == 2


def test_what_an_aborted_request_computed_stays_in_the_cache(rt):
    request_id = rt.add_request(LONG_PROMPT, **LONG)
    rt.step()
    rt.abort(request_id)
    drain(rt)
    (output,) = rt.generate(LONG_PROMPT, **LONG)
    assert output.num_cached_tokens == OPTIONS["max_num_batched_tokens"]
    assert output.checkpoint_origin == "final"


def test_abort_of_a_request_that_ended_or_never_was_changes_nothing(rt, reference):
    rt.abort("nobody")
    assert not rt.has_unfinished
    added = rt.add_request(PROMPTS[0], **LONG)
    rt.generate(PROMPTS[1], **{**LONG, "max_tokens": 30})
    rt.abort(added)  # ended, not delivered
    (output,) = rt.step()
    assert (reason_of(output), token_ids_of(output)) == ("length", reference[0])
    rt.abort(added)
    assert not rt.has_unfinished
    assert rt.step() == []


def test_abort_of_several_samples_ends_all_of_them(rt):
    request_id = rt.add_request(PROMPTS[0], n=5, temperature=1.0, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        rt.step()
    rt.abort(request_id)
    (output,) = drain(rt)[request_id]
    assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 5
    assert num_queued(rt) == 0


def test_an_id_can_be_used_again_once_its_abort_is_delivered(rt, reference):
    rt.add_request(LONG_PROMPT, request_id="mine", **LONG)
    rt.step()
    rt.abort("mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        rt.add_request(PROMPTS[0], request_id="mine")
    rt.step()
    rt.add_request(PROMPTS[0], request_id="mine", **LONG)
    assert token_ids_of(drain(rt)["mine"][-1]) == reference[0]


# Everything at once.


@pytest.mark.parametrize("seed", range(3))
def test_a_random_mix_of_calls_gives_everybody_what_they_would_get_alone(make, reference, seed):
    rng = np.random.default_rng(seed)
    rt = make(num_kv_slots=130, num_state_slots=5)
    expected: dict[str, int] = {}
    delivered: dict[str, RequestOutput] = {}
    streams: list[tuple[Iterator[RequestOutput], int, list[int]]] = []

    def step() -> None:
        delivered.update({output.request_id: output for output in rt.step()})

    for _ in range(45):
        which = int(rng.integers(len(PROMPTS)))
        match int(rng.integers(6)):
            case 0:
                expected[rt.add_request(PROMPTS[which], priority=int(rng.integers(3)), **LONG)] = which
            case 1 if len(streams) < 3:
                streams.append((rt.stream(PROMPTS[which], **LONG), which, []))
            case 2 if streams:
                stream, index, tokens = streams[int(rng.integers(len(streams)))]
                tokens.extend(token for delta in [next(stream, None)] if delta for token in token_ids_of(delta))
                assert tuple(tokens) == reference[index][: len(tokens)]
            case 3 if rng.random() < 0.4:
                (output,) = rt.generate(PROMPTS[which], **{**LONG, "max_tokens": 5})
                assert token_ids_of(output) == reference[which][:5]
            case 4 if expected and rng.random() < 0.5:
                rt.abort(str(rng.choice(list(expected))))
            case _:
                step()
    for stream, index, tokens in streams:
        tokens.extend(token for delta in stream for token in token_ids_of(delta))
        assert tuple(tokens) == reference[index]
    while rt.has_unfinished:
        step()
    assert set(delivered) == set(expected)
    for request_id, index in expected.items():
        output = delivered[request_id]
        assert output.finished
        assert reason_of(output) in ("length", "abort")
        assert token_ids_of(output) == reference[index][: len(token_ids_of(output))]
        assert reason_of(output) == "abort" or token_ids_of(output) == reference[index]

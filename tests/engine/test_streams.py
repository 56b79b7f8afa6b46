"""Deltas of streams, and streams between other calls, aborted and closed."""

from __future__ import annotations

from tests.engine.loop_helpers import LONG, LONG_PROMPT, PROMPTS, drain, num_queued, reason_of, token_ids_of


def test_the_deltas_of_a_stream_add_up_to_what_generate_gives(rt, reference):
    deltas = list(rt.stream(PROMPTS[0], **LONG))
    assert sum(map(token_ids_of, deltas), ()) == reference[0]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) == len(reference[0])
    assert not rt.has_unfinished


def test_the_deltas_of_several_samples_add_up_too(make):
    options = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 9, "logprobs": 1}
    (whole,) = make().generate(PROMPTS[0], **options)
    deltas = list(make().stream(PROMPTS[0], **options))
    for index, sample in enumerate(whole.outputs):
        parts = [delta.outputs[index] for delta in deltas]
        assert sum((part.token_ids for part in parts), ()) == sample.token_ids
        assert [entry for part in parts for entry in part.logprobs or []] == sample.logprobs
        assert parts[-1].finish_reason == sample.finish_reason


def test_two_interleaved_streams_and_a_driven_request(rt, reference):
    added = rt.add_request(PROMPTS[2], **LONG)
    streams = [rt.stream(PROMPTS[0], **LONG), rt.stream(PROMPTS[1], **{**LONG, "max_tokens": 7})]
    collected: list[tuple[int, ...]] = [(), ()]
    is_open = [True, True]
    while any(is_open):
        for index, stream in enumerate(streams):
            delta = next(stream, None)
            is_open[index] = delta is not None
            collected[index] += () if delta is None else token_ids_of(delta)
    assert collected == [reference[0], reference[1][:7]]
    delivered = drain(rt)
    assert set(delivered) == {added}
    assert token_ids_of(delivered[added][-1]) == reference[2]


def test_a_stream_that_waits_gets_all_that_came_meanwhile_at_once(rt, reference):
    stream = rt.stream(PROMPTS[0], **LONG)
    first = next(stream)
    rt.generate(PROMPTS[1], **{**LONG, "max_tokens": 40})
    rest = list(stream)
    assert token_ids_of(first) + sum(map(token_ids_of, rest), ()) == reference[0]
    assert rest[-1].finished


def test_a_stream_that_is_not_started_queues_nothing(rt):
    stream = rt.stream(PROMPTS[0], **LONG)
    assert not rt.has_unfinished
    stream.close()
    assert not rt.has_unfinished
    assert rt.stats().cache.num_requests == 0


def test_closing_a_stream_aborts_it_and_leaves_nothing_to_deliver(rt):
    stream = rt.stream(LONG_PROMPT, **LONG)
    next(stream)
    assert num_queued(rt) == 1
    stream.close()
    assert num_queued(rt) == 0
    assert rt.stats().kv.in_use == rt.stats().state.in_use == 0
    assert not rt.has_unfinished
    assert rt.step() == []


def test_an_abort_ends_a_stream_with_a_last_delta(rt):
    stream = rt.stream(PROMPTS[0], **LONG)
    first = next(stream)
    rt.abort(first.request_id)
    (last,) = stream
    assert (last.finished, reason_of(last), token_ids_of(last)) == (True, "abort", ())
    assert not rt.has_unfinished


def test_the_id_of_a_closed_stream_belongs_to_whoever_takes_it_next(rt):
    stream = rt.stream(PROMPTS[0], **LONG)
    request_id = next(stream).request_id
    stream.close()
    rt.add_request(LONG_PROMPT, request_id=request_id, **LONG)
    outputs = drain(rt)[request_id]
    assert reason_of(outputs[-1]) == "length"
    assert len(token_ids_of(outputs[-1])) == LONG["max_tokens"]
    assert {output.prompt_token_ids for output in outputs} == {tuple(LONG_PROMPT)}

"""add_request, step, abort, stream and generate, alone and between each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.engine.helpers import assert_idle
from tests.parity.zoo import CASES

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
    "num_kv_slots": 400,
    "num_state_slots": 14,
    "debug_checks": True,
}
LONG: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [5, 6, 7, 13], [14]]
LONG_PROMPT = [3 + i % 140 for i in range(60)]  # four steps of prefill


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return next(case for case in CASES if case.name == "granite-nope").build()


@pytest.fixture
def make(model: PreTrainedModel) -> Iterator[Callable[..., HybridRuntime]]:
    """Builds runtimes; at the end of the test each must be idle, with balanced pools and no lock held."""
    made: list[HybridRuntime] = []

    def build(**options: Any) -> HybridRuntime:
        made.append(HybridRuntime(model, **{**OPTIONS, **options}))
        return made[-1]

    yield build
    for rt in made:
        if not rt._is_closed:
            rt.prefix_cache.check()
            assert_idle(rt)


@pytest.fixture
def rt(make: Callable[..., HybridRuntime]) -> HybridRuntime:
    return make()


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """What each of `PROMPTS` gives with `LONG`, alone in a runtime of its own."""
    tokens = []
    for prompt in PROMPTS:
        with HybridRuntime(model, **OPTIONS) as rt:
            tokens.append(rt.generate(prompt, **LONG)[0].outputs[0].token_ids)
    assert len(set(tokens)) == len(PROMPTS)
    return tokens


def drain(rt: HybridRuntime) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; returns what was delivered, by request."""
    delivered: dict[str, list[RequestOutput]] = {}
    while rt.has_unfinished:
        for output in rt.step():
            delivered.setdefault(output.request_id, []).append(output)
    return delivered


def tokens_of(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def reason_of(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


def num_queued(rt: HybridRuntime) -> int:
    scheduler = rt.stats().scheduler
    return scheduler.num_waiting + scheduler.num_running


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
        assert [tokens_of(output) for output in outputs] == [tokens[: i + 1] for i in range(len(tokens))]
        assert reason_of(outputs[-1]) == "length"
        assert outputs[-1].prompt_token_ids == tuple(prompt)
    assert rt.stats().scheduler.num_finished == len(PROMPTS)
    assert rt.step() == []


def test_generate_gives_the_same_in_the_order_of_the_prompts(rt, reference):
    outputs = rt.generate(PROMPTS, **LONG)
    assert [tokens_of(output) for output in outputs] == reference
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    assert all(output.finished for output in outputs)
    assert not rt.has_unfinished


def test_one_set_of_sampling_params_per_prompt(rt, reference):
    lengths = [3, 1, 12, 5]
    outputs = rt.generate(PROMPTS, [SamplingParams(**{**LONG, "max_tokens": length}) for length in lengths])
    assert [tokens_of(output) for output in outputs] == [
        tokens[:length] for tokens, length in zip(reference, lengths, strict=True)
    ]
    outputs = rt.generate(PROMPTS[:2], [SamplingParams(**LONG), SamplingParams(**LONG)], max_new_tokens=2)
    assert [tokens_of(output) for output in outputs] == [tokens[:2] for tokens in reference[:2]]


def test_requests_added_before_a_generate_are_delivered_by_the_next_step(rt, reference):
    added = rt.add_request(PROMPTS[0], **LONG)
    unfinished = rt.add_request(PROMPTS[2], **{**LONG, "max_tokens": 60})
    (output,) = rt.generate(PROMPTS[1], **{**LONG, "max_tokens": 20})
    assert tokens_of(output)[:12] == reference[1]
    assert rt.has_unfinished
    first = {output.request_id: output for output in rt.step()}
    assert set(first) == {added, unfinished}
    assert (tokens_of(first[added]), first[added].finished) == (reference[0], True)
    assert tokens_of(first[unfinished])[:12] == reference[2]
    assert not first[unfinished].finished
    rest = drain(rt)
    assert set(rest) == {unfinished}
    assert len(tokens_of(rest[unfinished][-1])) == 60


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
        assert tokens_of(drain(rt)["mine"][-1]) == tokens


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
    assert (output.request_id, output.finished, reason_of(output), tokens_of(output)) == (request_id, True, "abort", ())
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
    assert tokens_of(end) == (tokens_of(seen[-1]) if seen else ())
    assert tokens_of(delivered[other][-1]) == reference[0]
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
    assert (reason_of(output), tokens_of(output)) == ("length", reference[0])
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
    assert tokens_of(drain(rt)["mine"][-1]) == reference[0]


# Streams.


def test_the_deltas_of_a_stream_add_up_to_what_generate_gives(rt, reference):
    deltas = list(rt.stream(PROMPTS[0], **LONG))
    assert sum(map(tokens_of, deltas), ()) == reference[0]
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
            collected[index] += () if delta is None else tokens_of(delta)
    assert collected == [reference[0], reference[1][:7]]
    delivered = drain(rt)
    assert set(delivered) == {added}
    assert tokens_of(delivered[added][-1]) == reference[2]


def test_a_stream_that_waits_gets_all_that_came_meanwhile_at_once(rt, reference):
    stream = rt.stream(PROMPTS[0], **LONG)
    first = next(stream)
    rt.generate(PROMPTS[1], **{**LONG, "max_tokens": 40})
    rest = list(stream)
    assert tokens_of(first) + sum(map(tokens_of, rest), ()) == reference[0]
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
    assert (last.finished, reason_of(last), tokens_of(last)) == (True, "abort", ())
    assert not rt.has_unfinished


def test_the_id_of_a_closed_stream_belongs_to_whoever_takes_it_next(rt):
    stream = rt.stream(PROMPTS[0], **LONG)
    request_id = next(stream).request_id
    stream.close()
    rt.add_request(LONG_PROMPT, request_id=request_id, **LONG)
    outputs = drain(rt)[request_id]
    assert reason_of(outputs[-1]) == "length"
    assert len(tokens_of(outputs[-1])) == LONG["max_tokens"]
    assert {output.prompt_token_ids for output in outputs} == {tuple(LONG_PROMPT)}


# Samples and seeds.


def test_more_samples_than_rows(rt):
    (output,) = rt.generate(PROMPTS[0], n=7, temperature=1.5, seed=3, max_tokens=6, ignore_eos=True)
    assert [sample.index for sample in output.outputs] == list(range(7))
    assert all((len(s.token_ids), s.finish_reason) == (6, "length") for s in output.outputs)
    assert len({sample.token_ids for sample in output.outputs}) == 7
    assert output.num_cached_tokens == 0
    assert rt.stats().scheduler.num_finished == 1


def test_samples_depend_on_their_index_and_on_nothing_else(make):
    options = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    (many,) = make().generate(PROMPTS[0], n=7, **options)
    (few,) = make(max_num_seqs=8, enable_prefix_cache=False).generate(PROMPTS[0], n=2, **options)
    (one,) = make().generate(PROMPTS[0], **options)
    assert [s.token_ids for s in few.outputs] == [s.token_ids for s in many.outputs[:2]]
    assert tokens_of(one) == tokens_of(many)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(make):
    params = [SamplingParams(temperature=1.2, seed=100 + i, max_tokens=10, ignore_eos=True) for i in range(4)]
    batch = [tokens_of(output) for output in make().generate(PROMPTS, params)]
    alone = [tokens_of(make().generate(prompt, each)[0]) for prompt, each in zip(PROMPTS, params, strict=True)]
    assert batch == alone
    twice = make().generate([PROMPTS[0]] * 2, params[0])
    assert tokens_of(twice[0]) == tokens_of(twice[1]) == batch[0]
    other = make().generate(PROMPTS[0], params[0], seed=5)
    assert tokens_of(other[0]) != batch[0]


def test_without_seeds_the_runtimes_makes_whole_runs_reproducible(make):
    def run(seed: int) -> list[tuple[int, ...]]:
        rt = make(seed=seed)
        outputs = rt.generate([PROMPTS[0]] * 3, temperature=1.5, max_tokens=8, ignore_eos=True)
        outputs += rt.generate(PROMPTS[0], temperature=1.5, max_tokens=8, ignore_eos=True)
        return [tokens_of(output) for output in outputs]

    first = run(1)
    assert first == run(1)
    assert first != run(2)
    assert len(set(first)) == 4  # every request has a seed of its own


# The progress bar.


def test_a_progress_bar_counts_requests(rt, capsys):
    rt.generate(PROMPTS, max_tokens=3, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "requests: 100%" in shown
    assert "4/4" in shown
    rt.generate(PROMPTS, max_tokens=3)
    assert capsys.readouterr().err == ""


# Interrupts and failures of a forward.


def fail_once(monkeypatch: pytest.MonkeyPatch, rt: HybridRuntime, name: str, error: BaseException, call: int) -> None:
    """Lets the `call`-th call of a method of the model do its work on the pools, and raise instead of returning."""
    method, calls = getattr(rt.model, name), iter(range(1, 10**6))

    def wrapped(*args: Any) -> Any:
        result = method(*args)
        if next(calls) == call:
            raise error
        return result

    monkeypatch.setattr(rt.model, name, wrapped)


@pytest.mark.parametrize(("name", "call"), [("prefill", 1), ("prefill", 3), ("decode", 1), ("decode", 5)])
def test_an_interrupt_ends_a_generate_and_leaves_the_runtime_usable(rt, reference, monkeypatch, name, call):
    fail_once(monkeypatch, rt, name, KeyboardInterrupt(), call)
    with pytest.raises(KeyboardInterrupt):
        rt.generate([*PROMPTS, LONG_PROMPT], **LONG)
    assert num_queued(rt) == 0
    assert rt.stats().kv.in_use == rt.stats().state.in_use == 0
    rt._engine.memory.check([])
    assert [tokens_of(output) for output in rt.generate(PROMPTS, **LONG)] == reference


def test_nothing_is_left_to_deliver_after_an_interrupted_generate(rt, monkeypatch):
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 2)
    with pytest.raises(KeyboardInterrupt):
        rt.generate(PROMPTS, **LONG)
    assert not rt.has_unfinished
    assert rt.step() == []


def test_an_interrupted_step_goes_on_with_the_next(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 4)
    ids = [rt.add_request(prompt, **LONG) for prompt in PROMPTS]
    delivered: dict[str, RequestOutput] = {}
    num_interrupts = 0
    while rt.has_unfinished:
        try:
            delivered |= {output.request_id: output for output in rt.step()}
        except KeyboardInterrupt:
            num_interrupts += 1
            rt._engine.memory.check(rt._engine.scheduler.running)
    assert num_interrupts == 1
    assert [tokens_of(delivered[request_id]) for request_id in ids] == reference


def test_requests_that_were_added_before_survive_an_interrupted_generate(rt, reference, monkeypatch):
    added = rt.add_request(PROMPTS[0], **LONG)
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        rt.generate(PROMPTS[1:], **LONG)
    delivered = drain(rt)
    assert set(delivered) == {added}
    assert tokens_of(delivered[added][-1]) == reference[0]


def test_an_interrupted_stream_is_aborted(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", KeyboardInterrupt(), 3)
    stream = rt.stream(PROMPTS[0], **LONG)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert list(stream) == []
    assert num_queued(rt) == 0
    assert tokens_of(rt.generate(PROMPTS[0], **LONG)[0]) == reference[0]


def test_a_forward_that_raises_once_among_several_costs_nobody_anything(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", RuntimeError("out of luck"), 3)
    assert [tokens_of(output) for output in rt.generate(PROMPTS, **LONG)] == reference


def test_a_forward_that_raises_over_one_request_ends_it_with_the_message(rt, reference, monkeypatch):
    fail_once(monkeypatch, rt, "decode", RuntimeError("out of luck"), 4)
    (output,) = rt.generate(PROMPTS[0], **LONG)
    assert (reason_of(output), output.outputs[0].stop_reason) == ("error", "RuntimeError: out of luck")
    assert tokens_of(output) == reference[0][: len(tokens_of(output))]
    assert tokens_of(rt.generate(PROMPTS[0], **LONG)[0]) == reference[0]


# Closing.


def test_a_closed_runtime_does_nothing_any_more(make):
    rt = make()
    queued = rt.stream(PROMPTS[0], **LONG)
    running = rt.stream(PROMPTS[1], **LONG)
    next(running)
    rt.add_request(PROMPTS[2], **LONG)
    rt.close()
    rt.close()
    rt.prefix_cache.check()
    rt._engine.memory.check([])
    assert not rt.has_unfinished
    for call in (
        lambda: rt.generate([5]),
        lambda: rt.stream([5]),
        lambda: rt.add_request([5]),
        lambda: rt.step(),
        lambda: rt.abort("0"),
        lambda: rt.reset_prefix_cache(),
        lambda: next(queued),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert not any(tokens_of(output) for output in running)  # it ends
    assert rt._engine.memory.kv_pool.layers == rt._engine.memory.state_pool.layers == ()


def test_a_context_manager_closes(make):
    with make() as rt:
        rt.generate(PROMPTS[0], max_tokens=2)
    with pytest.raises(RuntimeError, match="closed"):
        rt.generate([5])


def test_a_context_manager_closes_after_an_error_and_lets_it_through(make):
    rt = make()

    def use() -> None:
        with rt:
            rt.add_request(PROMPTS[0])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    with pytest.raises(RuntimeError, match="closed"):
        rt.step()


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
                tokens.extend(token for delta in [next(stream, None)] if delta for token in tokens_of(delta))
                assert tuple(tokens) == reference[index][: len(tokens)]
            case 3 if rng.random() < 0.4:
                (output,) = rt.generate(PROMPTS[which], **{**LONG, "max_tokens": 5})
                assert tokens_of(output) == reference[which][:5]
            case 4 if expected and rng.random() < 0.5:
                rt.abort(str(rng.choice(list(expected))))
            case _:
                step()
    for stream, index, tokens in streams:
        tokens.extend(token for delta in stream for token in tokens_of(delta))
        assert tuple(tokens) == reference[index]
    while rt.has_unfinished:
        step()
    assert set(delivered) == set(expected)
    for request_id, index in expected.items():
        output = delivered[request_id]
        assert output.finished
        assert reason_of(output) in ("length", "abort")
        assert tokens_of(output) == reference[index][: len(tokens_of(output))]
        assert reason_of(output) == "abort" or tokens_of(output) == reference[index]

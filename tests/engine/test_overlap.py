"""Steps that are scheduled while the one before runs: on real models, as if each had landed before the next.

Every step waits a random time before it runs, and slots that nobody owns when it is prepared hold NaN from then on.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.engine.cache_content import assert_content, states_of
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, random_tokens, runtime_of, tokens_of

TIGHT: dict[str, Any] = {"num_kv_slots": 44, "max_model_len": 40, "num_state_slots": 8, "max_num_batched_tokens": 8}


def overlapping(kind: str, *, seed: int = 0, **options: Any) -> HybridRuntime:
    """A runtime whose steps overlap, in a thread that takes its time."""
    rt = runtime_of(kind, overlap=True, **options)
    runner, memory, delays = rt._engine.runner, rt._engine.memory, random.Random(seed)
    prepare, launch = runner.prepare, runner.launch

    def prepare_and_note(step: Any) -> Any:
        free = memory.supply.kv.free_slots(), memory.supply.states.free_slots()
        return prepare(step), *(torch.from_numpy(slots.astype(np.int64)) for slots in free)

    def launch_late(prepared: Any) -> Any:
        time.sleep(delays.choice([0.0, 0.0, 0.001, 0.003]))
        step, kv_slots, state_slots = prepared
        memory.kv_pool.fill(kv_slots, torch.nan)
        memory.state_pool.fill(state_slots, torch.nan)
        return launch(step)

    runner.prepare, runner.launch = prepare_and_note, launch_late  # type: ignore[method-assign]
    return rt


def outcomes(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) for sample in output.outputs]
        for output in outputs
    ]


def waste(rt: HybridRuntime) -> int:
    return rt.stats().scheduler.num_wasted_rows


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(71)


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize("track_interval", [1, 2, 256])
def test_the_tokens_are_those_of_steps_one_after_the_other(
    kind: str, track_interval: int, rng: np.random.Generator
) -> None:
    """Chunked prompts that share beginnings, samples, seeds, all stop rules, and pools that preempt and evict."""
    shared = random_tokens(rng, 9)
    prompts = [[*shared, *random_tokens(rng, 6)] for _ in range(4)] + [random_tokens(rng, n) for n in (1, 2, 20)]
    params = [
        greedy(12),
        SamplingParams(max_tokens=9, temperature=0.9, seed=3, n=2, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, seed=4, stop_token_ids=list(range(0, 150, 5))),
        SamplingParams(max_tokens=12, temperature=0.8, seed=5, min_tokens=5, stop_token_ids=list(range(0, 150, 2))),
        SamplingParams(max_tokens=10, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        greedy(15),
    ]
    options = {**TIGHT, "track_interval": track_interval, "min_saving": 2}
    with runtime_of(kind, **options) as rt:
        expected = rt.generate(prompts, params)
    with overlapping(kind, **options) as rt:
        for _ in range(2):  # cold and warm
            outputs = rt.generate(prompts, params)
            assert outcomes(outputs) == outcomes(expected)
            for ours, theirs in zip(outputs, expected, strict=True):
                assert _logprobs(ours) == pytest.approx(_logprobs(theirs), rel=1e-9, abs=1e-9)
        assert rt.stats().scheduler.num_preemptions > 0
        assert rt.stats().cache.num_evicted_states > 0
        assert waste(rt) > 0
        assert_content(rt)
        assert_idle(rt)


def _logprobs(output: RequestOutput) -> list[float]:
    entries = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return [entry[token].logprob for entry in entries if entry for token in sorted(entry)]


@pytest.mark.parametrize("place", range(1, 10))
def test_a_stop_token_at_any_place_wastes_one_row_and_keeps_no_wrong_state(
    place: int, rng: np.random.Generator
) -> None:
    """The wasted row computed the last token, so the state that is left is that of all tokens."""
    prompts = [random_tokens(rng, 6), random_tokens(rng, 5)]
    with overlapping("gdn", track_interval=4, seed=place) as rt:
        tokens = tokens_of(rt.generate(prompts, greedy(9)))[0]
        assert waste(rt) == 0, "it is known beforehand which token is the last that max_tokens allows"
        place = tokens.index(tokens[place - 1]) + 1  # where it comes first
        rt.reset_prefix_cache()
        stop = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, stop_token_ids=[tokens[place - 1]])
        before = waste(rt)
        output = rt.generate(prompts[0], stop)[0]
        assert output.outputs[0].token_ids == tokens[:place]
        is_last = place == 9
        assert waste(rt) - before == (0 if is_last else 1)
        computed = 6 + place - (1 if is_last else 0)
        boundaries = [length for length in (8, 12) if length <= 6 + place - 1 and length < computed]
        assert states_of(rt) == {5: "tail"} | dict.fromkeys(boundaries[-1:], "track") | {computed: "final"}
        assert_content(rt)
        assert_idle(rt)


class Letters:
    """Decodes each token to a letter of its own."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(0x400 + token_id) for token_id in token_ids)


def test_a_stop_string_and_a_stream(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 6)
    with overlapping("kda", track_interval=2, tokenizer=Letters()) as rt:
        text = rt.generate(prompt, greedy(20))[0].outputs[0].text
        end = next(place for place in range(4, 20) if text.index(text[place - 2 : place]) == place - 2)
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop=text[end - 2 : end])
        deltas = [output.outputs[0] for output in rt.stream(prompt, params)]
        assert "".join(delta.text for delta in deltas) == text[: end - 2]
        assert deltas[-1].finish_reason == "stop"
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("steps", range(1, 12))
def test_an_abort_at_any_time_costs_the_others_nothing(steps: int, rng: np.random.Generator) -> None:
    prompts = [random_tokens(rng, length) for length in (12, 7, 3)]
    with overlapping("mamba2", max_num_batched_tokens=6, seed=steps) as rt:
        expected = tokens_of(rt.generate(prompts, greedy(6)))
        rt.reset_prefix_cache()
        ids = [rt.add_request(prompt, greedy(6)) for prompt in prompts]
        found: dict[str, RequestOutput] = {}
        for _ in range(steps):
            found |= {output.request_id: output for output in rt.step()}
        rt.abort(ids[0])
        while rt.has_unfinished:
            found |= {output.request_id: output for output in rt.step()}
        first = found[ids[0]].outputs[0]
        assert first.token_ids == expected[0][: len(first.token_ids)]
        assert first.finish_reason == ("length" if len(first.token_ids) == 6 else "abort")
        assert tokens_of([found[ids[1]], found[ids[2]]]) == expected[1:]
        assert_content(rt)
        assert_idle(rt)


def change_at(rt: HybridRuntime, call: int, change: Callable[[Any, Tensor], Tensor], patch: pytest.MonkeyPatch) -> None:
    """Changes the logits of the `call`-th decode, which has done its work on the pools, given its inputs."""
    decode, calls = rt.model.decode, iter(range(1, 10**6))

    def changed(inputs: Any, memory: Any) -> Tensor:
        logits = decode(inputs, memory)
        return change(inputs, logits) if next(calls) == call else logits

    patch.setattr(rt.model, "decode", changed)


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_a_forward_that_fails_among_several_costs_nobody_a_token(
    call: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it, which finds its states half written, is not believed."""
    prompts = [random_tokens(rng, length) for length in (6, 7, 13)]
    with overlapping("gdn", track_interval=2, max_num_batched_tokens=8) as rt:
        expected = tokens_of(rt.generate(prompts, greedy(8)))
        rt.reset_prefix_cache()

        def fail(inputs: Any, logits: Tensor) -> Tensor:
            if len(logits) == 1:
                return logits
            rt._engine.memory.state_pool.fill(inputs.working_slots_B, torch.nan)
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            change_at(rt, call, fail, patch)
            assert tokens_of(rt.generate(prompts, greedy(8))) == expected
        assert_content(rt)
        assert_idle(rt)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_logits_that_are_nan_end_their_request_only(
    call: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(rng, length) for length in (6, 7)]
    with overlapping("mamba2", track_interval=1) as rt:
        expected = tokens_of(rt.generate(prompts, greedy(8)))
        rt.reset_prefix_cache()

        def spoil(inputs: Any, logits: Tensor) -> Tensor:
            logits[0] = torch.nan
            return logits

        with monkeypatch.context() as patch:
            change_at(rt, call, spoil, patch)
            first, second = rt.generate(prompts, greedy(8))
        assert first.outputs[0].finish_reason == "error"
        assert first.outputs[0].token_ids == expected[0][: len(first.outputs[0].token_ids)]
        assert tokens_of([second]) == expected[1:]
        assert_content(rt)
        assert_idle(rt)


def test_the_next_step_is_launched_before_the_one_that_runs_has_ended(rng: np.random.Generator) -> None:
    with runtime_of("kda", overlap=True) as rt:
        runner, engine = rt._engine.runner, rt._engine
        launch, may_run = runner.launch, threading.Semaphore(0)

        def wait_and_launch(prepared: Any) -> Any:
            may_run.acquire()
            return launch(prepared)

        runner.launch = wait_and_launch  # type: ignore[method-assign]
        rt.add_request(random_tokens(rng, 5), greedy(4))
        assert rt.step() == []
        assert len(engine.in_flight) == 1
        threading.Timer(0.2, lambda: may_run.release(100)).start()
        launched = engine.num_steps
        [output] = rt.step()
        assert engine.num_steps == launched + 1
        assert len(output.outputs[0].token_ids) == 1
        [request] = engine.scheduler.running
        assert (request.num_landed_tokens, request.num_computed_tokens, request.num_tokens) == (5, 6, 6)
        while rt.has_unfinished:
            rt.step()
        assert_idle(rt)


def test_whoever_waits_for_a_step_in_flight_hits_what_it_leaves(rng: np.random.Generator) -> None:
    """Samples of one prompt, and a request that comes when the last chunk of the same prompt is in flight."""
    prompt = random_tokens(rng, 12)
    with overlapping("mamba2", min_saving=4, max_num_batched_tokens=6) as rt:
        rt.generate(prompt, max_tokens=3, n=4, temperature=0.8, seed=1, ignore_eos=True)
        assert rt.stats().scheduler.num_prefill_tokens == 12
        rt.reset_prefix_cache()
        rt.add_request(prompt, greedy(3))
        rt.step()
        rt.step()
        late = rt.add_request([*prompt, 5, 6], greedy(3))
        [request] = rt._engine.scheduler.running
        assert request.is_in_flight
        outputs: dict[str, RequestOutput] = {}
        while rt.has_unfinished:
            outputs |= {output.request_id: output for output in rt.step()}
        assert outputs[late].num_cached_tokens == 11
        assert_idle(rt)


def test_the_cache_is_not_touched_while_a_step_is_in_flight(rng: np.random.Generator, tmp_path: Path) -> None:
    prompts = [random_tokens(rng, 9), random_tokens(rng, 4)]
    with overlapping("gdn", min_saving=2, track_interval=2) as rt:
        expected = tokens_of(rt.generate(prompts, greedy(8)))
        saved = rt.save_prefix_cache(tmp_path / "cache")
        rt.reset_prefix_cache()
        ids = [rt.add_request(prompt, greedy(8)) for prompt in prompts]
        found: dict[str, RequestOutput] = {}
        num_in_flight = 0
        while rt.has_unfinished:
            found |= {output.request_id: output for output in rt.step()}
            num_in_flight += len(rt._engine.in_flight)
            rt.load_prefix_cache(tmp_path / "cache")
            assert not rt._engine.in_flight
            if rt._engine.scheduler.running:
                with pytest.raises(RuntimeError, match="are running"):
                    rt.reset_prefix_cache()
        assert num_in_flight > 5
        assert saved.num_checkpoints > 3
        assert tokens_of([found[request_id] for request_id in ids]) == expected
        assert_content(rt)
        assert_idle(rt)


def test_the_modes_around_its_calls_do_not_matter(rng: np.random.Generator) -> None:
    """Made in inference mode and used outside, used under autocast, while the steps run in a thread without either."""
    prompts = [random_tokens(rng, 9), random_tokens(rng, 4)]
    with torch.inference_mode():
        rt = overlapping("mamba2")
    with rt:
        expected = tokens_of(rt.generate(prompts, greedy(6)))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            assert tokens_of(rt.generate(prompts, greedy(6))) == expected
        assert_idle(rt)


# The thread.


def worker_of(rt: HybridRuntime) -> threading.Thread:
    [thread] = [thread for thread in threading.enumerate() if thread.name == "steps"]
    return thread


def test_no_thread_is_left_behind(rng: np.random.Generator) -> None:
    before = set(threading.enumerate())
    rt = runtime_of("kda", overlap=True)
    assert set(threading.enumerate()) == before, "there is none before the first step"
    rt.generate(random_tokens(rng, 5), greedy(3))
    thread = worker_of(rt)
    rt.add_request(random_tokens(rng, 5), greedy(30))
    rt.step()
    rt.close()
    assert not thread.is_alive()
    rt.close()


def test_a_runtime_that_nobody_has_any_more_takes_its_thread_along(rng: np.random.Generator) -> None:
    rt = runtime_of("kda", overlap=True)
    rt.generate(random_tokens(rng, 5), greedy(3))
    thread, engine = worker_of(rt), weakref.ref(rt._engine)
    del rt
    gc.collect()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert engine() is None


def test_an_interrupt_while_a_step_is_waited_for_loses_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step stays in flight; what was computed stays where it is."""
    prompts = [random_tokens(rng, 9), random_tokens(rng, 4)]
    with overlapping("gdn") as rt:
        expected = tokens_of(rt.generate(prompts, greedy(8)))
        rt.reset_prefix_cache()
        ids = [rt.add_request(prompt, greedy(8)) for prompt in prompts]
        wait, calls, num_interrupts = threading.Event.wait, iter(range(10**6)), 0

        def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and next(calls) % 2:
                raise KeyboardInterrupt
            return wait(event, timeout)

        monkeypatch.setattr(threading.Event, "wait", interrupted)
        found: dict[str, RequestOutput] = {}
        while rt.has_unfinished:
            try:
                found |= {output.request_id: output for output in rt.step()}
            except KeyboardInterrupt:
                num_interrupts += 1
        monkeypatch.undo()
        assert num_interrupts > 5
        assert tokens_of([found[request_id] for request_id in ids]) == expected
        assert rt.stats().scheduler.num_prefill_tokens + rt.stats().scheduler.num_decode_tokens <= 2 * (13 + 14 + 2)
        assert_content(rt)
        assert_idle(rt)

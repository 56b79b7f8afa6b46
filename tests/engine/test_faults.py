"""Forwards that raise or yield NaN: only the request that caused it may suffer, and it must say so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hybrid_runtime import HybridRuntime
from tests.engine.helpers import assert_idle, greedy, random_tokens, runtime_of, solo_tokens

POISON = 3
"""A token that the prompts hold nowhere else; the planted faults wait for it."""


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(21)
    return [[token if token != POISON else 4 for token in random_tokens(rng, length)] for length in (30, 45, 1, 12)]


Fault = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _wrap(rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Lets `fault(token ids of the forward, its logits)` stand between the real forwards and the engine."""
    model, prefill, decode = rt.model, rt.model.prefill, rt.model.decode
    monkeypatch.setattr(model, "prefill", lambda i, m: fault(i.token_ids_L, prefill(i, m)))
    monkeypatch.setattr(model, "decode", lambda i, m: fault(i.token_ids_B, decode(i, m)))


def _raise_on_poison(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if (token_ids == POISON).any():
        raise RuntimeError("planted: out of luck")
    return logits


@pytest.mark.parametrize("place", [0, 7, 28, 29])
@pytest.mark.parametrize("budget", [2048, 10])
def test_only_the_culprit_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, place: int, budget: int) -> None:
    """Wherever in its prompt the fault sits; the others end with the right tokens."""
    prompts = _prompts()
    expected = solo_tokens("kda", prompts[1:], [8] * 3)
    prompts[0][place] = POISON
    with runtime_of("kda", max_num_batched_tokens=budget) as rt:
        _wrap(rt, monkeypatch, _raise_on_poison)
        outputs = rt.generate(prompts, greedy(8))
        assert outputs[0].outputs[0].finish_reason == "error"
        assert outputs[0].outputs[0].stop_reason == "RuntimeError: planted: out of luck"
        assert [output.outputs[0].token_ids for output in outputs[1:]] == expected
        assert [output.outputs[0].finish_reason for output in outputs[1:]] == ["length"] * 3
        assert_idle(rt)


def test_a_fault_that_passes_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the first forwards fails once for the whole batch; every request still ends regularly."""
    prompts = _prompts()
    expected = solo_tokens("mamba2", prompts, [8] * 4)
    for failing in range(1, 12):
        calls = iter(range(1, 1000))

        def fault(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if next(calls) == failing and len(token_ids) > 1:  # noqa: B023  # used within this turn of the loop
                raise RuntimeError("planted")
            return logits

        with runtime_of("mamba2", max_num_batched_tokens=25) as rt, monkeypatch.context() as patch:
            _wrap(rt, patch, fault)
            assert [output.outputs[0].token_ids for output in rt.generate(prompts, greedy(8))] == expected
            assert_idle(rt)


def test_nothing_of_a_failed_forward_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward may have written half a state before it raised: the next request must not resume from that."""
    prompt = _prompts()[0]
    [expected] = solo_tokens("gdn", [prompt], [8])
    with runtime_of("gdn") as rt:
        with monkeypatch.context() as patch:

            def ruin(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                slot = rt._engine.scheduler.running[0].resident.working_slot
                rt._engine.memory.state_pool.fill(torch.tensor([slot]), torch.nan)
                raise RuntimeError("planted")

            _wrap(rt, patch, ruin)
            assert rt.generate(prompt, greedy(8))[0].outputs[0].finish_reason == "error"
        assert rt.prefix_cache.num_nodes == 0
        assert rt.generate(prompt, greedy(8))[0].outputs[0].token_ids == expected
        assert_idle(rt)


@pytest.mark.parametrize("budget", [2048, 29, 10])
def test_a_prefill_that_ends_in_nan_leaves_no_checkpoint(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Not even if the chunk samples no token: at a budget of 29 it ends where the checkpoint is due."""
    with runtime_of("kda", max_num_batched_tokens=budget) as rt:
        _wrap(rt, monkeypatch, lambda token_ids, logits: torch.full_like(logits, torch.nan))
        [output] = rt.generate(_prompts()[0], greedy(3))
        assert output.outputs[0].finish_reason == "error"
        assert rt.prefix_cache.num_nodes == 0
        assert_idle(rt)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_logits_are_an_error_not_a_token(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    prompts = _prompts()
    expected = solo_tokens("kda", prompts[1:], [8] * 3)

    with runtime_of("kda") as rt:

        def spoil(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """NaN in one row: that of the first prompt's request."""
            running = rt._engine.scheduler.running
            rows = [place for place, request in enumerate(running) if request.tokens.prompt_len == 30]
            if len(logits) == len(running) and rows:
                logits[rows[0], 5] = value
            return logits

        _wrap(rt, monkeypatch, spoil)
        outputs = rt.generate(prompts, greedy(8))
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "NaN" in str(outputs[0].outputs[0].stop_reason)
        assert [output.outputs[0].token_ids for output in outputs[1:]] == expected
        assert_idle(rt)


class FailingTokenizer:
    """Decodes each token to a letter, but one not at all, as tokenizers over a padded vocabulary may do."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        if POISON in token_ids:
            raise KeyError(f"no token {POISON}")
        return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_token_that_cannot_be_decoded_ends_its_request_only(logprobs: int | None) -> None:
    prompts = _prompts()
    expected = solo_tokens("kda", prompts[1:], [8] * 3)
    with runtime_of("kda", tokenizer=FailingTokenizer()) as rt:
        bad = greedy(8, logit_bias={POISON: 100.0}, logprobs=logprobs)
        outputs = rt.generate(prompts, [bad, *[greedy(8)] * 3])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert outputs[0].outputs[0].stop_reason == "KeyError: 'no token 3'"
        assert [output.outputs[0].token_ids for output in outputs[1:]] == expected
        assert_idle(rt)


def test_a_runtime_does_not_mind_the_modes_around_its_calls() -> None:
    """Made in inference mode and used outside, used under autocast: same tokens, no error."""
    prompts = _prompts()
    expected = solo_tokens("mamba2", prompts, [8] * 4)
    with torch.inference_mode():
        rt = runtime_of("mamba2")
    with rt:
        assert [output.outputs[0].token_ids for output in rt.generate(prompts, greedy(8))] == expected
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            assert [output.outputs[0].token_ids for output in rt.generate(prompts, greedy(8))] == expected
        assert_idle(rt)
    kda = solo_tokens("kda", prompts, [8] * 4)
    with runtime_of("kda") as rt, torch.autocast("cpu", dtype=torch.bfloat16):
        assert [output.outputs[0].token_ids for output in rt.generate(prompts, greedy(8))] == kda


def test_calls_from_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer or signal handler may call in the middle of a step: aborts are put off, all else is refused."""
    prompts = _prompts()
    expected = solo_tokens("kda", prompts[:1], [8])
    with runtime_of("kda") as rt:
        stream = rt.stream(prompts[1], greedy(8))
        next(stream)
        rt.add_request(prompts[2], greedy(8), request_id="aborted")
        refused: list[str] = []
        calls = iter(range(1000))

        def interfere(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if next(calls) == 3:
                stream.close()
                rt.abort("aborted")
                for call in (rt.step, rt.close, rt.reset_prefix_cache, lambda: rt.generate(prompts[3])):
                    with pytest.raises(RuntimeError, match="within a step"):
                        call()
                    refused.append("yes")
            return logits

        _wrap(rt, monkeypatch, interfere)
        assert rt.generate(prompts[0], greedy(8))[0].outputs[0].token_ids == expected[0]
        assert len(refused) == 4
        [aborted] = rt.step()
        assert (aborted.request_id, aborted.outputs[0].finish_reason) == ("aborted", "abort")
        assert not rt.has_unfinished
        assert_idle(rt)

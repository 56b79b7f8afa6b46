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


def test_a_prefill_that_ends_in_nan_leaves_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with runtime_of("kda") as rt:
        _wrap(rt, monkeypatch, lambda token_ids, logits: torch.full_like(logits, torch.nan))
        [output] = rt.generate(_prompts()[0], greedy(3))
        assert output.outputs[0].finish_reason == "error"
        assert rt.prefix_cache.num_nodes == 0
        assert_idle(rt)


def test_nan_logits_are_an_error_not_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = _prompts()
    expected = solo_tokens("kda", prompts[1:], [8] * 3)

    with runtime_of("kda") as rt:

        def spoil(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """NaN in one row: that of the first prompt's request."""
            running = rt._engine.scheduler.running
            rows = [place for place, request in enumerate(running) if request.tokens.prompt_len == 30]
            if len(logits) == len(running) and rows:
                logits[rows[0], 5] = torch.nan
            return logits

        _wrap(rt, monkeypatch, spoil)
        outputs = rt.generate(prompts, greedy(8))
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "NaN" in str(outputs[0].outputs[0].stop_reason)
        assert [output.outputs[0].token_ids for output in outputs[1:]] == expected
        assert_idle(rt)

"""Runtimes that speculate, when they are made: what is refused, and what is made do without."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, SamplingParams, SpeculativeConfig
from hybrid_runtime.engine import build, mtp_drafter
from hybrid_runtime.engine.speculation import SpeculationPlan
from hybrid_runtime.engine.steps import EagerSteps
from hybrid_runtime.models.adapters import adapt
from tests.parity.zoo import CASES

OPTIONS: dict[str, Any] = {
    "compile": "off",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "num_kv_slots": 200,
    "num_state_slots": 8,
}


def test_a_head_that_cannot_be_compiled_drafts_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiling the steps before takes long: eager ones pass for compiled."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(build, "CompiledSteps", EagerSteps)
    monkeypatch.setattr(mtp_drafter, "CompiledFunction", fail)
    with caplog.at_level(logging.WARNING, "hybrid_runtime"):
        runtime = HybridRuntime("tiny", speculative=SpeculativeConfig("mtp", num_steps=3), **OPTIONS)
    with runtime:
        assert "drafts are not compiled and run several times slower: OSError: no space left" in caplog.text
        runtime.generate(["for i in range(10):\n    print("], SamplingParams(max_tokens=24, ignore_eos=True))
        stats = runtime.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 0


def test_more_candidates_than_the_vocabulary_has_tokens_are_refused() -> None:
    config = SpeculativeConfig("mtp", topk=13, num_draft_tokens=5, mtp_path="head.safetensors")
    [case] = [case for case in CASES if case.name == "kimi"]
    model = adapt(dataclasses.replace(case, options={**case.options, "vocab_size": 12}).build())
    with pytest.raises(ValueError, match=r"speculative\.topk=13 exceeds the vocabulary of 12 tokens"):
        SpeculationPlan.load(config, model, None, None)

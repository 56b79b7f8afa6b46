"""The drafters of the package on the bundled checkpoint in float64: they hit, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams, SpeculativeConfig
from tests.engine.helpers import assert_idle
from tests.speculative.speculative_runs import outcomes

PROMPTS = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i in",
    "import os\n",
]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.0, stop=["\n\n"]),
    SamplingParams(max_tokens=24, temperature=0.7, seed=3, top_p=0.9, ignore_eos=True),
]
OPTIONS: dict[str, Any] = {
    "compile": "off",
    "dtype": "float64",
    "state_dtype": "float64",
    "debug_checks": True,
    "max_num_seqs": 3,
    "max_model_len": 160,
    "num_kv_slots": 400,
    "num_state_slots": 12,
    "track_interval": 8,
}
CONFIGS = [
    SpeculativeConfig("mtp", num_steps=3, rollback="fold"),
    SpeculativeConfig("mtp", num_steps=4, topk=3, num_draft_tokens=12, rollback="replay"),
    SpeculativeConfig("mtp", num_steps=2, topk=4, rollback="snapshot"),
    SpeculativeConfig("ngram", num_steps=5, rollback="replay"),
    SpeculativeConfig("ngram", num_steps=4, topk=3, num_draft_tokens=10, rollback="snapshot"),
    SpeculativeConfig("ngram", num_steps=7, ngram_min=1, ngram_max=2, rollback="fold"),
]


@pytest.fixture(scope="module")
def truth() -> Iterator[list[RequestOutput]]:
    with HybridRuntime("tiny", enable_prefix_cache=False, **OPTIONS) as rt:
        yield rt.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("speculative", CONFIGS, ids=lambda c: f"{c.method}-{c.num_steps}-{c.topk}-{c.rollback}")
def test_texts_are_those_of_plain_decoding(speculative: SpeculativeConfig, truth: list[RequestOutput]) -> None:
    """Cold, and once more from what that left in the cache."""
    with HybridRuntime("tiny", speculative=speculative, **OPTIONS) as rt:
        for num_cached in (False, True):
            outputs = rt.generate(PROMPTS, PARAMS)
            assert outcomes(outputs) == outcomes(truth)
            assert all((output.num_cached_tokens > 0) == num_cached for output in outputs)
        stats = rt.stats().speculation
        assert stats is not None
        assert stats.num_failed_drafts == 0
        assert stats.num_accepted_tokens > 10
        assert_idle(rt)


def test_a_head_hits_more_often_than_not_in_a_text_that_repeats_itself() -> None:
    """So the states, the KV and the hidden state that it reads are those of its root."""
    prompt = "x = 1\n" * 12
    with HybridRuntime("tiny", speculative=SpeculativeConfig("mtp", num_steps=2), **OPTIONS) as rt:
        output = rt.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)[0]
        assert output.metrics.num_accepted_tokens > output.metrics.num_drafted_tokens / 2
        assert_idle(rt)

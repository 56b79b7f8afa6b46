"""Compiled verifies and commits, with the C++ kernels, give the texts of plain eager decoding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from hybrid_runtime import HybridRuntime, RequestOutput
from hybrid_runtime.engine.compiled_steps import CompiledSteps
from tests.parity.zoo import CASES
from tests.speculative.speculative_runs import KINDS, ROOMY, TREE_SIZE, config, plain, random_prompts, scripted

PROMPTS = random_prompts(0, (5, 17, 30, 9))
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
NEAR_TIE = 1e-3  # in float64; float32 moves a logit of these small models by less than a tenth of it


@cache
def plain_outputs(name: str) -> list[RequestOutput]:
    with plain(name) as rt:
        return rt.generate(PROMPTS, **OPTIONS)


def margins(outputs: list[RequestOutput]) -> list[float]:
    """By how much each chosen token beat the next."""
    found = []
    for entry in (entry for output in outputs for entry in output.outputs[0].logprobs or ()):
        best, second, *_ = sorted((logprob.logprob for logprob in entry.values()), reverse=True)
        found.append(best - second)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "rollback", "dtype", "num_nodes", "max_num_seqs"),
    [
        ("kimi", "fold", "float64", TREE_SIZE, 6),
        *((name, "fold", "float32", TREE_SIZE, 6) for name in KINDS),
        # Of sizes at which the example that is compiled for fills the records, or has more rows than they.
        ("kimi", "snapshot", "float32", 4, 1),
        ("kimi", "replay", "float32", 4, 6),
    ],
)
def test_texts_are_those_of_plain_eager_decoding(
    name: str, rollback: str, dtype: str, num_nodes: int, max_num_seqs: int
) -> None:
    expected = plain_outputs(name)
    model = next(case for case in CASES if case.name == name).build().to(getattr(torch, dtype))
    drafter = scripted(expected)
    speculative = config(rollback, num_nodes=num_nodes)
    options = {**ROOMY, "compile": "auto", "enable_prefix_cache": False, "speculative": speculative}
    options["max_num_seqs"] = max_num_seqs
    with HybridRuntime(model, drafter=drafter, **options) as rt:
        assert isinstance(rt._engine.runner.steps, CompiledSteps)
        outputs = rt.generate(PROMPTS, **OPTIONS)
        stats = rt.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 20
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)
    if dtype == "float64":
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
        return
    for output, exact in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0].token_ids, exact.outputs[0].token_ids
        differing = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
        if differing:  # from a near tie on texts may part
            assert margins([exact])[differing[0]] < NEAR_TIE
    num_equal = sum(o.outputs[0].token_ids == e.outputs[0].token_ids for o, e in zip(outputs, expected, strict=True))
    assert num_equal >= len(PROMPTS) - 1

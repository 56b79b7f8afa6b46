"""Several samples per request, what a seed decides, and the progress bar over requests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hybrid_runtime import SamplingParams
from tests.engine.helpers import model_of, runtime_of
from tests.engine.loop_helpers import PROMPTS, token_ids_of
from tests.ops.draw_cases import OFF, RowOptions, possible_tokens

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
    assert token_ids_of(one) == token_ids_of(many)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(make):
    params = [SamplingParams(temperature=1.2, seed=100 + i, max_tokens=10, ignore_eos=True) for i in range(4)]
    batch = [token_ids_of(output) for output in make().generate(PROMPTS, params)]
    alone = [token_ids_of(make().generate(prompt, each)[0]) for prompt, each in zip(PROMPTS, params, strict=True)]
    assert batch == alone
    twice = make().generate([PROMPTS[0]] * 2, params[0])
    assert token_ids_of(twice[0]) == token_ids_of(twice[1]) == batch[0]
    other = make().generate(PROMPTS[0], params[0], seed=5)
    assert token_ids_of(other[0]) != batch[0]


def test_without_seeds_the_runtimes_makes_whole_runs_reproducible(make):
    def run(seed: int) -> list[tuple[int, ...]]:
        rt = make(seed=seed)
        outputs = rt.generate([PROMPTS[0]] * 3, temperature=1.5, max_tokens=8, ignore_eos=True)
        outputs += rt.generate(PROMPTS[0], temperature=1.5, max_tokens=8, ignore_eos=True)
        return [token_ids_of(output) for output in outputs]

    first = run(1)
    assert first == run(1)
    assert first != run(2)
    assert len(set(first)) == 4  # every request has a seed of its own


DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 1.3, "seed": 1, "n": 2},
    {"temperature": 0.9, "seed": 2, "n": 2, "top_k": 4, "top_p": 0.8},
    {"temperature": 0.0, "seed": 3},
    {"temperature": 2.0, "seed": 4, "min_p": 0.05, "top_k": 2**70},  # more than an int64 holds: off
    {"temperature": 1.0, "seed": 5, "logit_bias": {9: 6.0}},
)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_token_is_the_draw_of_its_seed_sample_and_place(overlap: bool) -> None:
    """From transformers' logits of the whole text, in float64: prompts in chunks, all options in one batch."""
    prompts = [*PROMPTS, [3 + place for place in range(20)]]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **options) for options in DRAWN]
    with runtime_of("mamba2", overlap=overlap, max_num_batched_tokens=12) as rt:
        outputs = rt.generate(prompts, params)
    model = copy.deepcopy(model_of("mamba2")).double()
    for prompt, output, own in zip(prompts, outputs, params, strict=True):
        for sample in output.outputs:
            with torch.no_grad():
                logits_LV = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0]
            for token, bias in (own.logit_bias or {}).items():
                logits_LV[:, token] += bias
            for position, token in enumerate(sample.token_ids, start=len(prompt)):
                row = RowOptions(
                    own.temperature,
                    own.min_p,
                    min(own.top_k or OFF, OFF),
                    own.top_p,
                    own.seed or 0,
                    sample.index,
                    position,
                )
                assert token in possible_tokens(logits_LV[position - 1], row), (prompt, sample.index, position)


# The progress bar.


def test_a_progress_bar_counts_requests(rt, capsys):
    rt.generate(PROMPTS, max_tokens=3, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "requests: 100%" in shown
    assert "4/4" in shown
    rt.generate(PROMPTS, max_tokens=3)
    assert capsys.readouterr().err == ""

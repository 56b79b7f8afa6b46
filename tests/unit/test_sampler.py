"""The sampler: what it draws from, what a row depends on, ties and masks, penalties, log-probabilities.

Shapes: B rows, V tokens of the vocabulary, N most likely tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.ops.noise import gumbel_noise, philox_4x32
from hybrid_runtime.sampling import SamplingInputs, SamplingRow, gather_logprobs, sample
from hybrid_runtime.sampling.sampler import apply_bias_and_penalties
from hybrid_runtime.sampling_params import SamplingParams

ALPHA = 1e-4
NUM_DRAWS = 20_000


def chi_square_p_value(counts, probabilities) -> float:
    """Probability of counts at least as far off; cells expected below 5 times are taken together."""
    counts, expected = np.asarray(counts, float), np.asarray(probabilities, float) * np.sum(counts)
    assert not counts[expected == 0].any()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    num_pooled = int(np.searchsorted(np.cumsum(expected), 5.0)) + 1
    counts = np.concatenate([[counts[:num_pooled].sum()], counts[num_pooled:]])
    expected = np.concatenate([[expected[:num_pooled].sum()], expected[num_pooled:]])
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def expected_probabilities(logits, params: SamplingParams):
    """The distribution by the definitions of the options, token by token, in the order vLLM applies them."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    probabilities = dict(enumerate(weights / weights.sum()))
    threshold = params.min_p * max(probabilities.values())
    probabilities = {token: p for token, p in probabilities.items() if p >= threshold}
    ranking = sorted(probabilities, key=lambda token: (-probabilities[token], token))
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
    total, share, kept = sum(probabilities[token] for token in ranking), 0.0, []
    for token in ranking:
        if share >= params.top_p and params.top_p < 1:
            break
        kept.append(token)
        share += probabilities[token] / total
    result = np.zeros(len(logits))
    result[kept] = [probabilities[token] for token in kept]
    return result / result.sum()


def draw(logits_V, params: SamplingParams, num_draws: int = NUM_DRAWS, seed: int = 1):
    """`num_draws` tokens at successive positions of one request."""
    rows = [SamplingRow(params, seed, 0, position) for position in range(num_draws)]
    inputs = SamplingInputs.build(rows, len(logits_V))
    return sample(logits_V.expand(num_draws, -1), inputs).token_ids_B


def logits_of(seed: int, *shape: int, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_distribution(options, dtype):
    params = SamplingParams(**options)
    logits_V = logits_of(3, 17, dtype=dtype)
    probabilities = expected_probabilities(logits_V.double().numpy(), params)
    counts = torch.bincount(draw(logits_V, params), minlength=17).numpy()
    assert chi_square_p_value(counts, probabilities) > ALPHA


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    st.integers(-1, 14),
    st.sampled_from([0.05, 0.3, 0.62, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.04, 0.31, 0.8, 1.0]),
    st.sampled_from([0.3, 1.0, 4.0]),
)
def test_the_support_is_exact(values, top_k, top_p, min_p, temperature):
    """Which tokens can be drawn at all, ties included: those beyond have never come, and no other is missing."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits_V = torch.tensor(values, dtype=torch.float64)
    probabilities = expected_probabilities(logits_V.numpy(), params)
    drawn = set(draw(logits_V, params, 600).tolist())
    assert drawn <= set(np.flatnonzero(probabilities))
    assert drawn >= set(np.flatnonzero(probabilities > 0.05))


def test_philox_gives_the_published_words():
    cases = [  # from the known-answer file of the authors' library Random123
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in cases:
        c0, c1, c2, c3 = map(torch.tensor, counter)
        result = philox_4x32((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
        assert [int(word) for word in result] == [int(word, 16) for word in words.split()]


@pytest.mark.parametrize("axis", ["token", "position", "sample", "seed", "high seed"])
def test_noise_is_uniform_and_uncorrelated_along_every_key(axis):
    size = 4096
    count = torch.arange(size)
    seeds = {"seed": count, "high seed": count << 32}.get(axis, torch.full((size,), 11))
    samples = count if axis == "sample" else torch.zeros_like(count)
    positions = count if axis == "position" else torch.full((size,), 5)
    if axis == "token":
        noise = gumbel_noise(seeds[:1], samples[:1], positions[:1], size, torch.float64)[0]
    else:
        noise = gumbel_noise(seeds, samples, positions, 1, torch.float64)[:, 0]
    uniform = torch.exp(-torch.exp(-noise))
    cells = (uniform * 16).long()
    assert chi_square_p_value(torch.bincount(cells, minlength=16).numpy(), np.full(16, 1 / 16)) > ALPHA
    for lag in (1, 2, 4):
        pairs = cells[:-lag] // 2 * 8 + cells[lag:] // 2
        assert chi_square_p_value(torch.bincount(pairs, minlength=64).numpy(), np.full(64, 1 / 64)) > ALPHA


def test_noise_is_finite_at_the_ends_of_the_uniform_range(monkeypatch):
    for dtype in (torch.float32, torch.float64):
        for word in (0, 2**32 - 1):
            words = tuple(torch.full((1, 1), word) for _ in range(4))
            monkeypatch.setattr("hybrid_runtime.ops.noise.philox_4x32", lambda *_, words=words: words)
            key = torch.zeros(1, dtype=torch.int64)
            assert gumbel_noise(key, key, key, 4, dtype).isfinite().all()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1e-30]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 22), st.floats(-5, 5), max_size=3),
    logprobs=st.sampled_from([None, 0, 3]),
)
TOKENS = st.lists(st.integers(0, 22), max_size=8)
ROWS = st.builds(
    SamplingRow,
    params=PARAMS,
    seed=st.integers(-(2**63), 2**63 - 1),
    sample_index=st.integers(0, 3),
    position=st.integers(0, 10**6),
    prompt_token_ids=TOKENS,
    output_token_ids=TOKENS.map(np.array),
    forbidden_token_ids=st.lists(st.integers(0, 22), max_size=2, unique=True),
)


@given(st.lists(ROWS, min_size=1, max_size=6), st.randoms(use_true_random=False), st.booleans())
def test_a_row_depends_on_nothing_else_in_the_batch(rows, random, is_float64):
    logits_BV = logits_of(random.randrange(100), len(rows), 23, dtype=torch.float64 if is_float64 else torch.float32)
    order = random.sample(range(len(rows)), len(rows))
    together = sample(logits_BV[order], SamplingInputs.build([rows[i] for i in order], 23))
    for place, index in enumerate(order):
        alone = sample(logits_BV[index : index + 1], SamplingInputs.build([rows[index]], 23))
        assert torch.equal(alone.token_ids_B, together.token_ids_B[place : place + 1])
        assert alone.token_ids_B[0] not in rows[index].forbidden_token_ids
        if alone.logprobs is not None and together.logprobs is not None:
            num_top = alone.logprobs.top_ids_BN.shape[1]
            for one, many in zip(alone.logprobs, together.logprobs, strict=True):
                assert torch.equal(one[0], many[place][:num_top] if one.ndim == 2 else many[place])


@pytest.mark.parametrize("changed", ["seed", "sample_index", "position"])
def test_every_key_changes_the_draws(changed):
    first = SamplingRow(SamplingParams(), seed=1, sample_index=0, position=10)
    logits_V = torch.zeros(1000)
    tokens = set()
    for step in range(20):
        row = dataclasses.replace(first, **{changed: getattr(first, changed) + step})
        tokens.add(int(sample(logits_V[None], SamplingInputs.build([row], 1000)).token_ids_B))
    assert len(tokens) >= 18


def test_a_greedy_row_takes_the_lowest_id_of_several_maxima():
    logits_BV = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    greedy = [SamplingRow(SamplingParams(temperature=0), 0, 0, 0)] * 2
    assert sample(logits_BV, SamplingInputs.build(greedy, 4)).token_ids_B.tolist() == [1, 0]
    top_1 = [SamplingRow(SamplingParams(top_k=1), 0, 0, position) for position in range(2)]
    assert sample(logits_BV, SamplingInputs.build(top_1, 4)).token_ids_B.tolist() == [1, 0]


def test_a_plain_greedy_batch_holds_no_tensor():
    rows = [SamplingRow(SamplingParams(temperature=0, top_p=0.5), 0, 0, 0)] * 3
    assert SamplingInputs.build(rows, 10) == SamplingInputs(bias=None, penalties=None, draw=None, num_logprobs=None)
    mixed = SamplingInputs.build([*rows, SamplingRow(SamplingParams(), 0, 0, 0)], 10)
    assert mixed.draw is not None
    assert mixed.draw.top_p_B is None


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1.0, 1e300])
def test_masked_tokens_never_win(temperature):
    logits_V = torch.tensor([5.0, -math.inf, 4.9, -math.inf, 1.0, 0.0])
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.999999)
    rows = [SamplingRow(params, 0, 0, position, forbidden_token_ids=[0, 2]) for position in range(500)]
    token_ids = sample(logits_V.expand(500, -1), SamplingInputs.build(rows, 6)).token_ids_B
    assert set(token_ids.tolist()) <= ({4} if temperature < 1e-20 else {4, 5})


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_a_row_without_any_allowed_token_goes_on_from_its_raw_logits(temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=1.1, logprobs=1)
    logits_BV = torch.tensor([[0.0, 2.0, 1.0], [-math.inf, -math.inf, -math.inf], [0.0, 1.0, math.inf]])
    rows = [SamplingRow(params, 0, 0, 0, forbidden_token_ids=range(3)) for _ in range(3)]
    result = sample(logits_BV, SamplingInputs.build(rows, 3))
    assert result.token_ids_B[[0, 2]].tolist() == [1, 2]
    assert result.logprobs is not None
    assert result.logprobs.token_logprobs_B[0].isfinite()


def naive_processed(logits, row: SamplingRow):
    """Bias, mask and penalties, one token at a time."""
    params, processed = row.params, []
    for token, value in enumerate(logits):
        value += (params.logit_bias or {}).get(token, 0.0)
        if token in row.forbidden_token_ids:
            value = -math.inf
        if token in row.prompt_token_ids or token in row.output_token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = list(row.output_token_ids).count(token)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty if count else 0.0
        processed.append(value)
    return processed


@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 1000))
def test_penalties_like_a_loop_over_the_tokens(rows, seed):
    logits_BV = logits_of(seed, len(rows), 23, dtype=torch.float64)
    processed_BV = apply_bias_and_penalties(logits_BV, SamplingInputs.build(rows, 23))
    expected_BV = torch.tensor(
        [naive_processed(logits, row) for logits, row in zip(logits_BV.tolist(), rows, strict=True)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(processed_BV, expected_BV, rtol=1e-14, atol=1e-14)


def test_prompt_tokens_count_for_the_repetition_penalty_only():
    logits = [1.0, 1.1, 1.2, 0.0]
    for params, expected in [
        (SamplingParams(temperature=0, repetition_penalty=2.0), 0),
        (SamplingParams(temperature=0, presence_penalty=2.0), 2),
        (SamplingParams(temperature=0, frequency_penalty=2.0), 2),
    ]:
        row = SamplingRow(params, 0, 0, 0, prompt_token_ids=[2, 2], output_token_ids=[1])
        token_ids = sample(torch.tensor([logits]), SamplingInputs.build([row], 4)).token_ids_B
        assert token_ids.tolist() == [expected]


def test_logprobs_are_of_the_raw_distribution():
    params = SamplingParams(temperature=0, logit_bias={4: 100}, logprobs=2)
    logits_BV = logits_of(8, 1, 6)
    result = sample(logits_BV, SamplingInputs.build([SamplingRow(params, 0, 0, 0)], 6))
    assert result.token_ids_B.tolist() == [4]
    assert result.logprobs is not None
    torch.testing.assert_close(result.logprobs.token_logprobs_B, logits_BV.log_softmax(-1)[:, 4])


@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 1000))
def test_gathered_logprobs(num_rows, num_top, seed):
    logits_BV = logits_of(seed, num_rows, 9, dtype=torch.float64)
    token_ids_B = torch.arange(num_rows)
    gathered = gather_logprobs(logits_BV, token_ids_B, num_top)
    for row, logits in enumerate(logits_BV.numpy()):
        logprobs = logits - np.log(np.exp(logits).sum())
        ranking = np.argsort(-logprobs)
        np.testing.assert_array_equal(gathered.top_ids_BN[row], ranking[:num_top])
        np.testing.assert_allclose(gathered.top_logprobs_BN[row], logprobs[ranking[:num_top]], rtol=1e-12)
        np.testing.assert_allclose(gathered.token_logprobs_B[row], logprobs[row], rtol=1e-12)
        assert gathered.token_ranks_B[row] == ranking.tolist().index(row) + 1


def test_bfloat16_logits_are_computed_in_float32():
    logits_BV = logits_of(2, 4, 50).bfloat16()
    rows = [SamplingRow(SamplingParams(top_p=0.9, logprobs=1), seed, 0, 0) for seed in range(4)]
    inputs = SamplingInputs.build(rows, 50)
    narrow, wide = sample(logits_BV, inputs), sample(logits_BV.float(), inputs)
    assert torch.equal(narrow.token_ids_B, wide.token_ids_B)
    assert narrow.logprobs is not None
    assert narrow.logprobs.token_logprobs_B.dtype == torch.float32


def test_the_sampler_compiles_into_one_graph():
    options: dict[str, Any] = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {3: 1}}
    rows = [
        SamplingRow(SamplingParams(temperature=0, logprobs=2), 0, 0, 7),
        SamplingRow(SamplingParams(**options), -5, 1, 7, prompt_token_ids=[1], output_token_ids=[2]),
    ]
    logits_BV, inputs = logits_of(4, 2, 40), SamplingInputs.build(rows, 40)
    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")(logits_BV, inputs)
    eager = sample(logits_BV, inputs)
    assert torch.equal(compiled.token_ids_B, eager.token_ids_B)
    torch.testing.assert_close(compiled.logprobs, eager.logprobs)


def test_noise_lowered_by_inductor_is_the_same():
    """Its integer arithmetic must not narrow or overflow: one wrong bit gives another noise altogether."""
    seeds, samples, positions = torch.tensor([[-5, 2**62 + 1, 7], [0, 1, 2], [3, 2**20, 2**32 - 1]])
    arguments = (seeds, samples, positions, 301, torch.float64)
    compiled = torch.compile(gumbel_noise, fullgraph=True)(*arguments)
    torch.testing.assert_close(compiled, gumbel_noise(*arguments), rtol=1e-12, atol=1e-12)

"""The C++ draw: against the definitions of the options, at the size of real vocabularies, and against the distribution.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hybrid_runtime.ops import cpu_kernels
from hybrid_runtime.ops import draw as plain
from tests.ops.draw_cases import RowOptions, check_exact_shares, check_rows, draws, inputs_of, noise_of
from tests.ops.test_draw import GREEDY_ROWS, MISFITS, misfit
from tests.unit.test_sampler import ALPHA, NUM_DRAWS, chi_square_p_value

F32, F64 = torch.float32, torch.float64
SIZES = (1, 2, 5, 23, 256, 259, 600)  # blocks are of 256 tokens
VOCABULARY = 50_257
OPTIONS = [
    RowOptions(),
    RowOptions(temperature=0.4),
    RowOptions(top_p=0.9),
    RowOptions(top_p=1e-4),
    RowOptions(top_k=50),
    RowOptions(top_k=20_000),
    RowOptions(min_p=0.02),
    RowOptions(temperature=0.7, top_k=1000, top_p=0.8, min_p=0.01),
]


def normal(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)


@given(draws(SIZES))
def test_a_draw_is_what_the_definitions_give(case: tuple[Tensor, list[RowOptions]]) -> None:
    logits_BV, rows = case
    for dtype in (F64, F32):
        for all_filters in (False, True):
            ids_B = cpu_kernels.draw_tokens(logits_BV.to(dtype), inputs_of(rows, all_filters=all_filters))
            check_rows(ids_B, logits_BV.to(dtype), rows)


@pytest.mark.parametrize("row", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_draw_from_a_real_vocabulary_is_the_plain_form(row: RowOptions, scale: float) -> None:
    """In float64 no rounding is large enough to matter to these rows."""
    options = inputs_of([replace(row, seed=seed, position=9) for seed in range(6)])
    logits_BV = normal(6, VOCABULARY) * scale
    assert torch.equal(cpu_kernels.draw_tokens(logits_BV, options), plain.draw_tokens(logits_BV, options))


@pytest.mark.parametrize("row", OPTIONS[:4], ids=str)
def test_draws_follow_the_distribution(row: RowOptions) -> None:
    """Of tokens in three blocks; what each row may draw is checked above."""
    logits_V = normal(17, dtype=F32) * 2
    spread_V = torch.full((700,), -math.inf).index_put((torch.arange(17) * 41,), logits_V)
    options = inputs_of([replace(row, position=position, seed=5) for position in range(NUM_DRAWS)])
    ids_B = cpu_kernels.draw_tokens(spread_V.expand(NUM_DRAWS, -1), options)
    weights_V = torch.exp((logits_V.double() - logits_V.max()) / row.temperature)
    sorted_V, order_V = (weights_V / weights_V.sum()).sort(descending=True)
    is_kept_V = sorted_V.cumsum(0) - sorted_V < row.top_p
    shares_V = torch.zeros(17, dtype=F64).index_put((order_V,), sorted_V * is_kept_V)
    assert not (ids_B % 41).any()
    counts_V = torch.bincount(ids_B // 41, minlength=17)
    assert chi_square_p_value(counts_V.numpy(), (shares_V / shares_V.sum()).numpy()) > ALPHA


@pytest.mark.parametrize(("logits", "expected"), GREEDY_ROWS)
def test_a_greedy_row_takes_the_first_maximum(logits: list[float], expected: int) -> None:
    options = inputs_of([RowOptions(temperature=0, top_k=1, top_p=0.1, min_p=1.0, seed=seed) for seed in range(4)])
    assert cpu_kernels.draw_tokens(torch.tensor([logits] * 4), options).tolist() == [expected] * 4


def test_a_row_depends_on_nothing_else(use_threads) -> None:
    """Not on other rows, their order or number, strides, or the number of threads."""
    rows = [replace(row, seed=seed, position=seed) for seed, row in enumerate(OPTIONS * 2)]
    logits_BV = normal(len(rows), 3001, dtype=F32)
    expected = [
        cpu_kernels.draw_tokens(logits_BV[i : i + 1], inputs_of([row], all_filters=True)).item()
        for i, row in enumerate(rows)
    ]
    wide_BV = torch.full((len(rows), 3100), math.nan)
    wide_BV[:, 50:3051] = logits_BV
    for num_threads in (1, 2, 3):
        use_threads(num_threads)
        assert cpu_kernels.draw_tokens(logits_BV, inputs_of(rows)).tolist() == expected
        assert cpu_kernels.draw_tokens(wide_BV[:, 50:3051], inputs_of(rows)).tolist() == expected
        assert cpu_kernels.draw_tokens(logits_BV.flip(0), inputs_of(rows[::-1])).tolist() == expected[::-1]


@pytest.mark.parametrize("place", [0, 300, 699, slice(0, 700), slice(1, 700)])
def test_a_row_with_nan_gives_some_token_and_leaves_the_others_alone(place: int | slice) -> None:
    rows = [replace(row, seed=3) for row in [RowOptions(temperature=0), *OPTIONS] for _ in range(2)]
    logits_BV = normal(len(rows), 700)
    expected_B = cpu_kernels.draw_tokens(logits_BV, inputs_of(rows))
    logits_BV[::2, place] = math.nan
    ids_B = cpu_kernels.draw_tokens(logits_BV, inputs_of(rows))
    assert torch.equal(ids_B[1::2], expected_B[1::2])
    assert ids_B.min() >= 0
    assert ids_B.max() < 700


@pytest.mark.parametrize("dtype", [F32, F64])
def test_flat_rows_and_rows_in_the_order_of_their_noise(dtype: torch.dtype) -> None:
    """The most passes that a form could need: each token falls to a filter after the ones with more noise."""
    row, size = RowOptions(seed=11), 4000
    falling_V = -noise_of(row, size).argsort().argsort() / size * 1e-3
    for logits_V in (torch.zeros(size, dtype=dtype), falling_V.to(dtype)):
        for options in (replace(row, top_k=1), replace(row, top_p=1e-12)):
            ids_B = cpu_kernels.draw_tokens(logits_V[None], inputs_of([options]))
            assert ids_B.item() == logits_V.argmax().item()
        rows = [replace(row, top_k=64), replace(row, top_p=1e-3), replace(row, top_k=64, top_p=0.5)]
        check_rows(cpu_kernels.draw_tokens(logits_V.expand(3, -1), inputs_of(rows)), logits_V.expand(3, -1), rows)


def test_exact_shares() -> None:
    check_exact_shares(cpu_kernels.draw_tokens)


def test_no_rows() -> None:
    assert cpu_kernels.draw_tokens(torch.zeros(0, 5), inputs_of([], all_filters=True)).shape == (0,)


def test_it_compiles_into_one_graph() -> None:
    rows = [replace(row, seed=seed) for seed, row in enumerate(OPTIONS)]
    logits_BV = normal(len(rows), 90)
    compiled = torch.compile(cpu_kernels.draw_tokens, fullgraph=True)
    for options in (inputs_of(rows), inputs_of([RowOptions()] * len(rows))):
        assert torch.equal(compiled(logits_BV, options), cpu_kernels.draw_tokens(logits_BV, options))
        operator = torch.ops.hybrid_runtime_cpu.draw_tokens.default
        torch.library.opcheck(operator, (logits_BV, *options), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=MISFITS[name][1]):
        cpu_kernels.draw_tokens(*misfit(name))

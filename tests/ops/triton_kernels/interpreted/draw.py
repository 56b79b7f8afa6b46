"""Draws in Triton against the definitions of the options.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hybrid_runtime.ops import triton_kernels
from hybrid_runtime.ops.triton_kernels import draw as kernels
from tests.ops.draw_cases import RowOptions, check_exact_shares, check_rows, draws, inputs_of, noise_of
from tests.ops.test_draw import GREEDY_ROWS, MISFITS, misfit

F32, F64 = torch.float32, torch.float64
OPTIONS = [
    RowOptions(),
    RowOptions(temperature=0),
    RowOptions(top_p=0.9),
    RowOptions(top_k=50),
    RowOptions(temperature=0.7, top_k=90, top_p=0.8, min_p=0.01),
]


def normal(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)


@given(draws((1, 2, 5, 23, 64, 259), max_rows=3))
@settings(max_examples=12, deadline=None)
def test_a_draw_is_what_the_definitions_give(case: tuple[Tensor, list[RowOptions]]) -> None:
    logits_BV, rows = case
    for dtype in (F64, F32):
        ids_B = triton_kernels.draw_tokens(logits_BV.to(dtype), inputs_of(rows))
        check_rows(ids_B, logits_BV.to(dtype), rows)


@pytest.mark.parametrize(("dtype", "block"), [(F32, kernels.BLOCK_TOKENS), (F64, kernels.BLOCK_TOKENS_DOUBLE)])
def test_rows_of_several_blocks_in_a_wider_tensor(dtype: torch.dtype, block: int) -> None:
    rows = [replace(row, seed=seed) for seed, row in enumerate(OPTIONS)]
    wide_BV = torch.full((len(rows), 2 * block + 40), math.nan, dtype=dtype)
    logits_BV = wide_BV[:, 20 : 2 * block + 27]
    logits_BV.copy_(normal(*logits_BV.shape))
    ids_B = triton_kernels.draw_tokens(logits_BV, inputs_of(rows))
    check_rows(ids_B, logits_BV, rows)
    for i, row in enumerate(rows):
        assert triton_kernels.draw_tokens(logits_BV[i : i + 1], inputs_of([row])).item() == ids_B[i]


@pytest.mark.parametrize(("logits", "expected"), GREEDY_ROWS)
def test_a_greedy_row_takes_the_first_maximum(logits: list[float], expected: int) -> None:
    options = inputs_of([RowOptions(temperature=0, top_k=1, top_p=0.1, min_p=1.0)])
    assert triton_kernels.draw_tokens(torch.tensor([logits]), options).tolist() == [expected]


@pytest.mark.parametrize("place", [3, slice(0, 40)])
def test_a_row_with_nan_gives_some_token(place: int | slice) -> None:
    logits_BV = normal(len(OPTIONS), 40, dtype=F32)
    logits_BV[:, place] = math.nan
    ids_B = triton_kernels.draw_tokens(logits_BV, inputs_of(OPTIONS))
    assert ids_B.min() >= 0
    assert ids_B.max() < 40


def test_flat_rows_and_rows_in_the_order_of_their_noise() -> None:
    """The most passes that a form could need: each token falls to a filter after the ones with more noise."""
    row, size = RowOptions(seed=11), 3000
    falling_V = -noise_of(row, size).argsort().argsort() / size * 1e-3
    for logits_V in (torch.zeros(size), falling_V.float()):
        rows = [replace(row, top_k=1), replace(row, top_p=1e-12), replace(row, top_k=64, top_p=0.5)]
        logits_BV = logits_V.expand(3, -1)
        check_rows(triton_kernels.draw_tokens(logits_BV, inputs_of(rows)), logits_BV, rows)


def test_exact_shares() -> None:
    check_exact_shares(triton_kernels.draw_tokens)


def test_no_rows() -> None:
    assert triton_kernels.draw_tokens(torch.zeros(0, 5), inputs_of([], all_filters=True)).shape == (0,)


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=MISFITS[name][1]):
        triton_kernels.draw_tokens(*misfit(name))


def test_the_schema_is_the_kernels() -> None:
    operator = torch.ops.hybrid_runtime.draw_tokens.default
    torch.library.opcheck(operator, (torch.zeros(5, 9), *inputs_of(OPTIONS)), test_utils="test_schema")

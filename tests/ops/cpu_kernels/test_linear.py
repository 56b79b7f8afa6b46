"""Linear layers of few rows against float64, and which inputs they take.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_runtime.ops.cpu_kernels import linear
from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned


def operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = functional.linear(x.double(), weight.double())
    magnitude = functional.linear(x.double().abs(), weight.double().abs())
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    assert_within_budget(linear(x, weight, bias), functional.linear(x, weight, bias), exact, magnitude)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 17, 64, 65])
@pytest.mark.parametrize(("inputs", "outputs"), [(50, 7), (1, 1), (31, 16), (64, 33), (768, 100)])
def test_every_number_of_rows_keeps_the_budget(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, inputs, outputs, dtype)
    check(x, weight, bias)
    check(x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_leading_shape_and_any_strides(dtype: torch.dtype) -> None:
    x, weight, bias = operands(6, 50, 7, dtype)
    expected = linear(x, weight, bias)
    assert torch.equal(linear(x.view(2, 3, 50), weight, bias), expected.view(2, 3, 7))
    assert torch.equal(linear(x[0], weight, bias), expected[0])
    wide = x.new_full((6, 70), torch.nan)
    wide[:, 10:60] = x
    assert torch.equal(linear(wide[:, 10:60], weight, bias), expected)
    assert torch.equal(linear(x.mT.contiguous().mT, weight, bias), expected)
    assert torch.equal(linear(poisoned(x.view(2, 3, 50)), weight, poisoned(bias)), expected.view(2, 3, 7))
    check(x, poisoned(weight), bias)
    check(x, weight.mT.contiguous().mT, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(dtype: torch.dtype, use_threads) -> None:
    x, weight, bias = operands(64, 300, 1000, dtype)
    use_threads(1)
    together = linear(x, weight, bias)
    use_threads(2)
    assert torch.equal(linear(x, weight, bias), together)
    for rows in (1, 2, 3, 5, 8, 33):
        assert torch.equal(linear(x[:rows], weight, bias), together[:rows])


def test_a_nan_or_infinity_stays_in_its_row() -> None:
    x, weight, _ = operands(5, 40, 20, torch.bfloat16)
    x[1, 3], x[3, 7] = torch.nan, torch.inf
    y = linear(x, weight)
    assert y[1].isnan().all()
    assert y[3].isinf().all()
    assert y[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x, w, b: (x[:, 1:], w, b), "last axis of x must have size 40"),
        (lambda x, w, b: (x.float(), w, b), "x and weight_OI must have one dtype"),
        (lambda x, w, b: (x, w, b.float()), "bias_O and weight_OI must have one dtype"),
        (lambda x, w, b: (x, w, b[1:]), "bias_O must have size 20 on axis 0, not 19"),
        (lambda x, w, b: (x, w[0], b), "weight_OI must have 2 axes, not 1"),
        (lambda x, w, b: (x.sum(), w, b), "last axis of x"),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        linear(*change(*operands(5, 40, 20, torch.bfloat16)))

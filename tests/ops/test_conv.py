"""The short convolution: every form against the token-by-token one, and that against torch's convolution.

Shapes: L flat tokens, S sequences, D channels, W taps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d

from hybrid_runtime.ops.conv import causal_conv, conv_recurrent, conv_step
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.delta_cases import layouts

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class ConvCase:
    x_LD: Tensor
    weight_DW: Tensor
    bias_D: Tensor | None
    windows_SWD: Tensor
    layout: RaggedLayout


def make_case(
    layout: RaggedLayout, *, taps: int = 4, channels: int = 5, bias: bool = True, dtype: torch.dtype, seed: int = 0
) -> ConvCase:
    """Tokens behind the last sequence are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x_LD = randn(layout.num_tokens, channels)
    x_LD[sum(layout.lengths) :] = math.nan
    windows_SWD = randn(len(layout.lengths), taps - 1, channels)
    return ConvCase(x_LD, randn(channels, taps), randn(channels) if bias else None, windows_SWD, layout)


@st.composite
def cases(draw: st.DrawFn, max_length: int = 30) -> ConvCase:
    return make_case(
        draw(layouts(max_length)),
        taps=draw(st.integers(1, 5)),
        channels=draw(st.integers(1, 6)),
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def run(form, case: ConvCase) -> tuple[Tensor, Tensor]:
    return form(case.x_LD, case.weight_DW, case.bias_D, case.windows_SWD, case.layout)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_definition_is_a_causal_convolution(taps: int):
    layout = RaggedLayout.build([2, 9], [[1, 2], [9]])
    case = make_case(layout, taps=taps, dtype=torch.float64)
    y_LD, windows_RWD = run(conv_recurrent, case)
    padded_WD = [torch.cat([case.windows_SWD[s], x_LD]) for s, x_LD in enumerate(case.x_LD.split([2, 9]))]
    expected = [conv1d(x_WD.mT, case.weight_DW[:, None], case.bias_D, groups=5).mT for x_WD in padded_WD]
    torch.testing.assert_close(y_LD, torch.cat(expected), rtol=1e-14, atol=1e-14)
    ends = [(0, 1), (0, 2), (1, 9)]
    assert torch.equal(windows_RWD, torch.stack([padded_WD[s][end : end + taps - 1] for s, end in ends]))


@given(cases())
def test_index_table_form_is_the_definition_bit_for_bit(case: ConvCase):
    y_LD, windows_RWD = run(conv_recurrent, case)
    fast_y_LD, fast_windows_RWD = run(causal_conv, case)
    assert fast_y_LD.dtype == fast_windows_RWD.dtype == case.x_LD.dtype
    assert torch.equal(fast_y_LD, y_LD)
    assert torch.equal(fast_windows_RWD, windows_RWD)
    assert not fast_y_LD[sum(case.layout.lengths) :].any()


@given(cases(max_length=8))
def test_step_is_the_definition_bit_for_bit(case: ConvCase):
    lengths, starts = case.layout.lengths, case.layout.starts
    layout = RaggedLayout.build(lengths, num_tokens=case.layout.num_tokens)
    y_LD, windows_SWD = conv_recurrent(case.x_LD, case.weight_DW, case.bias_D, case.windows_SWD, layout)
    num_sequences = len(lengths)
    slots_S = torch.arange(num_sequences, 0, -1) * 2
    pool = torch.full((2 * num_sequences + 2, *case.windows_SWD.shape[1:]), math.nan, dtype=case.x_LD.dtype)
    pool[0] = 0
    pool[slots_S] = case.windows_SWD
    for t in range(max(lengths)):
        alive = [s for s in range(num_sequences) if t < lengths[s]]
        rows = torch.tensor([0, *(starts[s] + t for s in alive), starts[0]])
        slots_B = torch.tensor([0, *slots_S[alive].tolist(), 0])
        y_BD = conv_step(case.x_LD[rows], case.weight_DW, case.bias_D, pool, slots_B)
        assert y_BD.isfinite().all()
        assert y_BD.dtype == case.x_LD.dtype
        assert torch.equal(y_BD[1:-1], y_LD[rows[1:-1]])
    assert torch.equal(pool[slots_S], windows_SWD)
    assert pool[0].isfinite().all()
    assert pool[1::2].isnan().all()


def test_step_keeps_the_dtype_of_the_pool():
    case = make_case(RaggedLayout.build([1]), dtype=torch.bfloat16)
    pool = torch.zeros(2, 3, 5, dtype=torch.float32)
    y_BD = conv_step(case.x_LD, case.weight_DW, case.bias_D, pool, torch.tensor([1]))
    assert y_BD.dtype == torch.bfloat16
    assert torch.equal(pool[1, -1], case.x_LD[0].float())


def test_gradients_of_the_index_table_form():
    case = make_case(RaggedLayout.build([1, 6], [[1], [2, 6]], num_tokens=7), dtype=torch.float64)
    tensors = (case.x_LD, case.weight_DW, case.bias_D, case.windows_SWD)
    inputs = [tensor.requires_grad_() for tensor in tensors if tensor is not None]

    def gradients(form) -> tuple[Tensor, ...]:
        y_LD, windows_RWD = form(*inputs, case.layout)
        return torch.autograd.grad(y_LD.square().sum() + windows_RWD.square().sum(), inputs)

    for fast, plain in zip(gradients(causal_conv), gradients(conv_recurrent), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-13, atol=1e-13)

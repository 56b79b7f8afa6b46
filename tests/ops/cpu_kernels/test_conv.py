"""The convolution's twins give the bits of the PyTorch forms.

Shapes: L flat tokens, S sequences, B rows, D channels, W taps, U slots of a pool.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from hybrid_runtime.ops import conv, cpu_kernels
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.cpu_kernels.budget import poisoned
from tests.ops.test_conv import ConvCase, cases, make_case, run

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@given(cases())
def test_prefill_is_the_plain_form_bit_for_bit(case: ConvCase) -> None:
    y_LD, windows_RWD = run(conv.causal_conv, case)
    twin_y_LD, twin_windows_RWD = run(cpu_kernels.causal_conv, case)
    assert torch.equal(twin_y_LD, y_LD)
    assert torch.equal(twin_windows_RWD, windows_RWD)


@pytest.mark.parametrize(("dtype", "weights", "windows"), [(BF16, BF16, BF16), (BF16, F32, F32), (F32, BF16, F64)])
@pytest.mark.parametrize("channels", [1, 50, 300])
def test_prefill_takes_any_dtypes_and_strides(
    channels: int, dtype: torch.dtype, weights: torch.dtype, windows: torch.dtype, use_threads
) -> None:
    layout = RaggedLayout.build([3, 70, 1], [[1, 3], [2, 64, 64], []], num_tokens=77)
    case = make_case(layout, channels=channels, dtype=dtype)
    case = replace(case, weight_DW=case.weight_DW.to(weights), windows_SWD=case.windows_SWD.to(windows))
    assert case.bias_D is not None
    expected = run(conv.causal_conv, case)
    use_threads(2)
    strided = ConvCase(
        poisoned(case.x_LD), poisoned(case.weight_DW), poisoned(case.bias_D), poisoned(case.windows_SWD), layout
    )
    for each in (case, strided):
        for twin, plain in zip(run(cpu_kernels.causal_conv, each), expected, strict=True):
            assert torch.equal(twin, plain)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 50, 300])
@pytest.mark.parametrize(
    ("dtype", "weights", "pool_dtype"),
    [(BF16, BF16, BF16), (BF16, F32, BF16), (F32, F32, F32), (F64, F64, F64), (BF16, BF16, F32), (F32, F64, F32)],
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_step_is_the_plain_form_bit_for_bit(
    taps: int, channels: int, dtype: torch.dtype, weights: torch.dtype, pool_dtype: torch.dtype, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(taps * channels)

    def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    x_BD, weight_DW = randn(5, channels, dtype=dtype), randn(channels, taps, dtype=weights)
    bias_D = randn(channels, dtype=weights) if with_bias else None
    slots_B = torch.tensor([3, 0, 8, 1, 0])
    live_B = slots_B > 0
    pool = torch.full((9, taps - 1, channels), torch.nan, dtype=pool_dtype)
    pool[slots_B] = randn(5, taps - 1, channels, dtype=pool_dtype)
    plain_pool = pool.clone()
    plain_y = conv.conv_step(x_BD, weight_DW, bias_D, plain_pool, slots_B)
    for x, weight, bias in (
        (x_BD, weight_DW, bias_D),
        (poisoned(x_BD), poisoned(weight_DW), None if bias_D is None else poisoned(bias_D)),
    ):
        twin_pool = pool.clone()
        y_BD = cpu_kernels.conv_step(x, weight, bias, twin_pool, slots_B)
        assert y_BD.dtype == dtype
        assert torch.equal(y_BD[live_B], plain_y[live_B])
        assert y_BD.isfinite().all()
        assert torch.equal(twin_pool[1:].nan_to_num(7), plain_pool[1:].nan_to_num(7))
        if dtype == pool_dtype and (weights == F64) == (dtype == F64):
            assert torch.equal(twin_pool[0], pool[0])  # an own kernel leaves slot 0 as it is


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x, w, b, pool, slots: (x, w, b, pool, slots + 5), "slots_B.3. is 9, which is no slot of a pool of 9"),
        (lambda x, w, b, pool, slots: (x, w, b, pool, slots[1:]), "x_BD must have size 4 on axis 0"),
        (lambda x, w, b, pool, slots: (x[:, 1:], w, b, pool, slots), "x_BD must have size 6 on axis 1"),
        (lambda x, w, b, pool, slots: (x, w[:, 1:], b, pool, slots), "window_pool must have size 2 on axis 1"),
        (lambda x, w, b, pool, slots: (x, w, b[1:], pool, slots), "bias_D must have size 6"),
        (lambda x, w, b, pool, slots: (x, w, b, pool.mT.contiguous().mT, slots), "window_pool must be contiguous"),
        (lambda x, w, b, pool, slots: (x, w[:, :0], b, pool, slots), "at least one tap"),
    ],
)
def test_a_step_refuses_what_does_not_fit(change, complaint: str) -> None:
    pool = torch.zeros(9, 3, 6)
    operands = (torch.ones(5, 6), torch.ones(6, 4), torch.ones(6), pool, torch.tensor([1, 2, 3, 4, 0]))
    with pytest.raises(ValueError, match=complaint):
        cpu_kernels.conv_step(*change(*operands))
    assert not pool.any()


@pytest.mark.parametrize("field", ["token_sequence_L", "token_offset_L", "state_sequence_R", "state_length_R"])
def test_a_layout_that_points_outside_is_refused(field: str) -> None:
    layout = RaggedLayout.build([4, 3])
    case = make_case(layout, dtype=F32)
    broken = replace(layout, **{field: getattr(layout, field) + 9})
    with pytest.raises(ValueError, match="can't"):
        run(cpu_kernels.causal_conv, replace(case, layout=broken))

"""One token of the short convolution against its twin, bit for bit: both sum in one order."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops import conv, triton_kernels

NUM_SLOTS = 9
TWIN: Callable[..., Tensor] = conv.conv_step


def make_step(
    slots: list[int], *, channels: int, taps: int, bias: bool, dtype: torch.dtype, pool_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Operands in the order of both forms; the window is NaN in every slot that no row names."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    pool = torch.full((NUM_SLOTS + 1, taps - 1, channels), math.nan, dtype=pool_dtype)
    pool[slots] = normal(len(slots), taps - 1, channels, dtype=pool_dtype)
    pool[0] = 0.5
    x_BD = normal(len(slots), channels + 3)[:, 1:-2]  # a slice of a wider projection
    return x_BD, normal(channels, taps), normal(channels) if bias else None, pool, torch.tensor(slots)


@pytest.mark.parametrize("slots", [[4], [3, 0, 9, 1, 0, 2, 0, 8]])
@pytest.mark.parametrize(("channels", "taps", "bias"), [(130, 4, True), (5, 2, False), (7, 1, True), (128, 3, False)])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_a_step_is_its_twin_bit_for_bit(
    slots: list[int], channels: int, taps: int, bias: bool, dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    *operands, pool, slots_B = make_step(
        slots, channels=channels, taps=taps, bias=bias, dtype=dtype, pool_dtype=pool_dtype
    )
    expected_pool, null_slot = pool.clone(), pool[0].clone()
    y_BD = triton_kernels.conv_step(*operands, pool, slots_B)
    expected_y_BD = TWIN(*operands, expected_pool, slots_B)
    assert y_BD.dtype == dtype
    assert y_BD.equal(expected_y_BD)
    torch.testing.assert_close(pool[1:], expected_pool[1:], rtol=0, atol=0, equal_nan=True)
    assert pool[0].equal(null_slot)


def test_weights_may_be_transposed() -> None:
    x_BD, weight_DW, bias_D, pool, slots_B = make_step(
        [1, 2], channels=5, taps=4, bias=True, dtype=torch.float32, pool_dtype=torch.float32
    )
    transposed_DW = weight_DW.t().contiguous().t()
    expected_y_BD = TWIN(x_BD, weight_DW, bias_D, pool.clone(), slots_B)
    assert triton_kernels.conv_step(x_BD, transposed_DW, bias_D, pool, slots_B).equal(expected_y_BD)


@pytest.mark.parametrize("bias", [False, True])
def test_the_schema_names_what_changes(bias: bool) -> None:
    step = make_step([0, 3], channels=5, taps=4, bias=bias, dtype=torch.float32, pool_dtype=torch.float32)
    torch.library.opcheck(triton_kernels.conv_step, step, test_utils="test_schema")

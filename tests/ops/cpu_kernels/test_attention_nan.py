"""A key that is not a number shows in what attends to it."""

from __future__ import annotations

import pytest
import torch

from hybrid_runtime.ops import attention, cpu_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_no_number_makes_the_output_none(dtype: torch.dtype, value: float) -> None:
    """As in the plain form: the engine must see it in the logits. The other row does not."""
    generator = torch.Generator().manual_seed(0)
    q_BHD = torch.rand(2, 2, 8, generator=generator).to(dtype) + 0.5
    k_pool, v_pool = (torch.randn(40, 1, 8, generator=generator).to(dtype) for _ in range(2))
    k_pool[7] = value
    table = torch.arange(40, dtype=torch.int32).reshape(2, 20)
    arguments = (q_BHD, k_pool, v_pool, table, torch.tensor([0, 1]), torch.tensor([19, 19]), 20)
    expected = attention.decode_attention(*arguments, scale=0.3)
    result = cpu_kernels.decode_attention(*arguments, scale=0.3)
    assert torch.equal(result.isnan(), expected.isnan())
    assert bool(result[0].isnan().all()) == (value != -torch.inf)
    assert not result[1].isnan().any()

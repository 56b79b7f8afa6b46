"""The kernels inside a compiled graph: whole, in place, for any batch size.

Shapes: B rows, D hidden size, H heads, P head dim, N state dim, W taps, V head dim of attention.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from hybrid_runtime.ops import cpu_kernels
from hybrid_runtime.ops.ragged import RaggedLayout

NUM_SLOTS, HEADS, HEAD_DIM, STATE_DIM, TAPS = 9, 6, 4, 10, 4
CHANNELS = HEADS * HEAD_DIM + 2 * STATE_DIM
CONTEXT = 40


def step(
    x_BD: Tensor,
    weights: dict[str, Tensor],
    pools: dict[str, Tensor],
    slots_B: Tensor,
    table: Tensor,
    lens_B: Tensor,
) -> Tensor:
    """One of each kernel that decodes; every pool is an input of the graph."""
    projected_BX = cpu_kernels.linear(x_BD, weights["input"])
    xbc_BC, dt_BH, rest_BX = projected_BX.split([CHANNELS, HEADS, 2 * HEADS * HEAD_DIM], dim=-1)
    xbc_BC = cpu_kernels.conv_step(xbc_BC, weights["conv"], None, pools["window"], slots_B)
    x_BX, b_BN, c_BN = xbc_BC.split([HEADS * HEAD_DIM, STATE_DIM, STATE_DIM], dim=-1)
    heads = (-1, HEADS, HEAD_DIM)
    y_BHP = cpu_kernels.mamba2_step(
        x_BX.reshape(heads), dt_BH, weights["decay"], b_BN[:, None], c_BN[:, None], pools["ssm"], slots_B
    )
    q_BX, v_BX = rest_BX.chunk(2, dim=-1)
    y_BHP = y_BHP + cpu_kernels.gdn_step(
        q_BX.reshape(heads), y_BHP, v_BX.reshape(heads), dt_BH, dt_BH, pools["delta"], slots_B
    )
    y_BHP = y_BHP + cpu_kernels.decode_attention(
        y_BHP, pools["keys"], pools["values"], table, slots_B, lens_B, CONTEXT, scale=0.5
    )
    return cpu_kernels.linear(y_BHP.reshape(-1, HEADS * HEAD_DIM), weights["output"], weights["bias"])


def operands(rows: int) -> tuple:
    generator = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    weights = {
        "input": randn(CHANNELS + HEADS + 2 * HEADS * HEAD_DIM, 16),
        "conv": randn(CHANNELS, TAPS),
        "decay": -randn(HEADS).exp(),
        "output": randn(16, HEADS * HEAD_DIM),
        "bias": randn(16),
    }
    pools = {
        "window": randn(NUM_SLOTS, TAPS - 1, CHANNELS),
        "ssm": randn(NUM_SLOTS, HEADS, HEAD_DIM, STATE_DIM),
        "delta": randn(NUM_SLOTS, HEADS, HEAD_DIM, HEAD_DIM),
        "keys": randn(CONTEXT, 2, HEAD_DIM),
        "values": randn(CONTEXT, 2, HEAD_DIM),
    }
    slots_B = torch.randperm(NUM_SLOTS - 1, generator=generator)[:rows] + 1
    slots_B[0] = 0
    table = torch.randint(CONTEXT, (NUM_SLOTS, CONTEXT), generator=generator, dtype=torch.int32)
    lens_B = torch.randint(1, CONTEXT, (rows,), generator=generator)
    per_row = (randn(rows, 16), slots_B, lens_B)
    for tensor in per_row:
        torch._dynamo.mark_dynamic(tensor, 0)
    return per_row[0], weights, pools, slots_B, table, lens_B


def test_one_graph_serves_every_batch_and_writes_its_pools_in_place() -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    codes: list[str] = []
    for rows in (4, 2, 7):
        arguments, expected_arguments = operands(rows), operands(rows)
        with torch.no_grad():
            if codes:
                y_BD = compiled(*arguments)
            else:
                y_BD, codes = run_and_get_code(compiled, *arguments)
        # The graph's own additions may be fused; the kernels are the same.
        torch.testing.assert_close(y_BD, step(*expected_arguments), rtol=1e-5, atol=1e-6)
        for name, pool in arguments[2].items():
            torch.testing.assert_close(pool, expected_arguments[2][name], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    (code,) = codes
    assert len(re.findall(r"torch\.ops\.hybrid_runtime_cpu\.\w+\.default\(", code)) >= 6
    for name, pool in operands(2)[2].items():
        shape = re.escape(str(tuple(pool.shape)))
        assert not re.search(rf"empty_strided\w*\({shape}", code), f"the graph allocates another {name} pool"


def test_linear_does_not_guard_on_the_number_of_rows() -> None:
    """One graph for rows that an own kernel takes and for rows that aten takes."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(cpu_kernels.linear, fullgraph=True, backend=counter)
    weight = torch.randn(7, 5)
    for rows in (3, 64, 65, 300):
        x = torch.randn(rows, 5)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x, weight), cpu_kernels.linear(x, weight))
    assert counter.frame_count == 1


def test_the_schemas_and_shapes_are_those_of_the_kernels() -> None:
    x_BD, weights, pools, slots_B, table, lens_B = operands(3)
    ops = torch.ops.hybrid_runtime_cpu
    heads, groups = torch.randn(3, HEADS, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    group_N = torch.randn(3, 1, STATE_DIM)
    rates_BH = -torch.rand(3, HEADS)
    layout = RaggedLayout.build([4, 2], [[1, 4], [2]], num_tokens=7)
    sequences = (layout.token_sequence_L, layout.token_offset_L, layout.state_sequence_R, layout.state_length_R)
    ends = torch.tensor([1, 4, 6])
    token_N = torch.randn(7, 1, STATE_DIM)
    prefill_parts = (torch.randn(7, HEADS, HEAD_DIM), torch.rand(7, HEADS), weights["decay"], token_N, token_N)
    calls = [
        (ops.linear, (x_BD, weights["input"], None)),
        (ops.conv_step, (torch.randn(3, CHANNELS), weights["conv"], None, pools["window"], slots_B)),
        (ops.mamba2_step, (heads, -rates_BH, weights["decay"], group_N, group_N, pools["ssm"], slots_B)),
        (ops.delta_step, (groups, groups, heads, rates_BH[..., None], -rates_BH, pools["delta"], slots_B)),
        (ops.causal_conv, (torch.randn(7, CHANNELS), weights["conv"], None, pools["window"][:2], *sequences, ends)),
        (ops.mamba2_prefill, (*prefill_parts, pools["ssm"][:2], *sequences)),
        (ops.decode_attention, (heads, pools["keys"], pools["values"], table, slots_B, lens_B, 0.5, -1)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))

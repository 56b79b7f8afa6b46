"""Every kernel assembles for Hopper at the sizes of real models, within its registers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops import triton_kernels
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.triton_kernels import attention as kernels
from tests.ops.triton_kernels.assembly import Assembled, assembled_launches

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")

NUM_ROWS = 8
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
Launch = Callable[[], object]


def slots(num_rows: int = NUM_ROWS) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.int64)


def mamba2(*, tokens: torch.dtype = BF16, state: torch.dtype = F32, dims: tuple[int, int] = (64, 128)) -> Launch:
    """48 heads of one group."""
    (head_dim, state_dim), gates = dims, torch.promote_types(state, F32)
    b_BGN = torch.zeros(NUM_ROWS, 1, state_dim, dtype=tokens)
    x_BHP, dt_BH = torch.zeros(NUM_ROWS, 48, head_dim, dtype=tokens), torch.zeros(NUM_ROWS, 48, dtype=gates)
    pool = torch.zeros(2, 48, head_dim, state_dim, dtype=state)
    return lambda: triton_kernels.mamba2_step(x_BHP, dt_BH, dt_BH[0], b_BGN, b_BGN, pool, slots())


def delta(*, per_channel: bool, state: torch.dtype = F32, dims: tuple[int, int] = (128, 128)) -> Launch:
    """32 heads, for GDN of 16 key heads."""
    key_dim, value_dim = dims
    q_BGK = torch.zeros(NUM_ROWS, 32 if per_channel else 16, key_dim, dtype=state)
    v_BHV, beta_BH = torch.zeros(NUM_ROWS, 32, value_dim, dtype=state), torch.zeros(NUM_ROWS, 32, dtype=state)
    log_a = torch.zeros(NUM_ROWS, 32, key_dim, dtype=state) if per_channel else beta_BH
    pool = torch.zeros(2, 32, value_dim, key_dim, dtype=state)
    step = triton_kernels.kda_step if per_channel else triton_kernels.gdn_step
    return lambda: step(q_BGK, q_BGK, v_BHV, log_a, beta_BH, pool, slots())


def conv(*, dtype: torch.dtype, bias: bool) -> Launch:
    x_BD, weight_DW = torch.zeros(NUM_ROWS, 4352, dtype=dtype), torch.zeros(4352, 4, dtype=dtype)
    pool = torch.zeros(2, 3, 4352, dtype=dtype)
    return lambda: triton_kernels.conv_step(x_BD, weight_DW, x_BD[0] if bias else None, pool, slots())


def attention(
    num_heads: int, num_groups: int, dim: int, *, dtype: torch.dtype = BF16, pool: torch.dtype = BF16, **options: int
) -> Launch:
    q_BHD = torch.zeros(NUM_ROWS, num_heads, dim, dtype=dtype)
    k_pool, v_pool = (torch.zeros(2, num_groups, dim, dtype=pool) for _ in range(2))
    context = (torch.zeros(2, 4096, dtype=torch.int32), slots(), slots() + 1, 4096)
    return lambda: triton_kernels.decode_attention(q_BHD, k_pool, v_pool, *context, scale=0.1, **options)


def latent(num_heads: int, *, dtype: torch.dtype = BF16) -> Launch:
    q_BHC, pool = torch.zeros(NUM_ROWS, num_heads, 576, dtype=dtype), torch.zeros(2, 576, dtype=dtype)
    context = (torch.zeros(2, 4096, dtype=torch.int32), slots(), slots() + 1, 4096)
    return lambda: kernels.decode_latents(q_BHC, pool, 512, *context, scale=0.1)


def copies() -> None:
    table = triton_kernels.SlotTable.of([torch.zeros(3, 4000), torch.zeros(3, 5, dtype=torch.int8)])
    triton_kernels.copy_slots(table, slots(2), slots(2))
    triton_kernels.clear_slots(table, slots(2))


def draw(num_tokens: int, *, dtype: torch.dtype = F32, filters: bool = True) -> Launch:
    logits_BV = torch.zeros(NUM_ROWS, num_tokens, dtype=dtype)
    ones_B = torch.ones(NUM_ROWS, dtype=F64)
    share_B = ones_B if filters else None
    options = DrawInputs(ones_B, share_B, slots() if filters else None, share_B, slots(), slots(), slots())
    return lambda: triton_kernels.draw_tokens(logits_BV, options)


LAUNCHES: dict[str, Launch] = {
    "mamba2": mamba2(),
    "mamba2-float32": mamba2(tokens=F32),
    "mamba2-float64": mamba2(tokens=F64, state=F64),
    "mamba2-odd": mamba2(dims=(20, 12)),
    "gdn": delta(per_channel=False),
    "kda": delta(per_channel=True),
    "kda-float64": delta(per_channel=True, state=F64),
    "kda-odd": delta(per_channel=True, dims=(24, 20)),
    "conv": conv(dtype=BF16, bias=True),
    "conv-float32": conv(dtype=F32, bias=False),
    "copies": copies,
    "attention-64": attention(12, 4, 64),
    "attention-128": attention(32, 8, 128),
    "attention-256": attention(16, 2, 256),
    "attention-of-one-key-head": attention(128, 1, 128),
    "attention-256-of-one-key-head": attention(32, 1, 256),
    "attention-window": attention(32, 8, 128, window=512),
    "attention-float32": attention(32, 8, 128, dtype=F32, pool=F32),
    "attention-float32-of-bfloat16": attention(32, 8, 128, dtype=F32),
    "attention-float64": attention(12, 4, 64, dtype=F64, pool=F64),
    "latent": latent(32),
    "latent-128-heads": latent(128),
    "latent-float32": latent(32, dtype=F32),
    "latent-float64": latent(32, dtype=F64),
    "draw": draw(100_352),
    "draw-without-filters": draw(100_352, filters=False),
    "draw-odd": draw(50_257),
    "draw-float64": draw(100_352, dtype=F64),
    "draw-odd-float64": draw(50_257, dtype=F64),
}


def assemble(launch: Launch) -> list[Assembled]:
    with assembled_launches() as assembled:
        launch()
    return assembled


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_kernel_spills(name: str) -> None:
    for kernel in assemble(LAUNCHES[name]):
        assert kernel.spilled == 0, kernel
        assert kernel.registers <= 255
        assert kernel.shared <= 227 * 1024  # of a processor


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_a_state_is_moved_in_vectors_by_enough_programs(name: str) -> None:
    """Loads and stores of 16 bytes; on each processor, 25 KB of float32 states in flight (see `launch.py`)."""
    (kernel,) = assemble(LAUNCHES[name])
    assert kernel.ptx.count("ld.global.v4.b32") == kernel.ptx.count("st.global.v4.b32") == 4
    programs = 65536 // (kernel.registers * 32 * kernel.num_warps)
    assert programs * 2048 * 4 >= 25_000


def test_copies_move_vectors() -> None:
    copy, clear = assemble(copies)
    assert "ld.global.v2.b64" in copy.ptx
    assert "st.global.v2.b64" in copy.ptx
    assert "st.global.v2.b64" in clear.ptx


@pytest.mark.parametrize("name", ["attention-128", "latent"])
def test_keys_arrive_while_others_are_multiplied(name: str) -> None:
    """Asynchronous copies of 16 bytes, and products on the tensor cores."""
    split, _ = assemble(LAUNCHES[name])
    assert "cp.async.cg.shared.global" in split.ptx
    assert "mma.sync" in split.ptx

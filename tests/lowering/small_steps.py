"""One-token steps of the project's operations at small sizes, to lower in one process and to run in another.

Shapes: B rows, U slots of a state pool, T slots of a KV pool; all others as in the operations' files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from hybrid_runtime.ops.attention import decode_attention
from hybrid_runtime.ops.conv import conv_step
from hybrid_runtime.ops.gdn import gdn_step
from hybrid_runtime.ops.mamba2 import mamba2_step
from hybrid_runtime.ops.norms import l2_norm, rms_norm

B, U, T = 3, 7, 64
CONTEXT = 24
SLOTS_B = torch.tensor([4, 0, 6])  # the row in the middle is padding
BF16 = torch.bfloat16


@dataclass(frozen=True)
class SmallStep:
    """`arguments` are drawn anew, and alike, on each call; `function` mutates the pools among them."""

    function: Callable[..., tuple[Tensor, ...]]
    arguments: Callable[[], tuple[Tensor, ...]]


def normal(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return (0.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _conv(x_BD: Tensor, weight_DW: Tensor, bias_D: Tensor, pool: Tensor, slots_B: Tensor) -> tuple[Tensor, ...]:
    return (silu(conv_step(x_BD, weight_DW, bias_D, pool, slots_B)),)


def _conv_arguments() -> tuple[Tensor, ...]:
    return normal(B, 72, seed=1), normal(72, 4, seed=2), normal(72, seed=3), normal(U, 3, 72, seed=4), SLOTS_B.clone()


def _mamba2(*operands: Tensor) -> tuple[Tensor, ...]:
    return (mamba2_step(*operands),)


def _mamba2_arguments() -> tuple[Tensor, ...]:
    return (
        normal(B, 4, 8, seed=1),
        normal(B, 4, seed=2, dtype=torch.float32).exp(),
        -normal(4, seed=3, dtype=torch.float32).exp(),
        normal(B, 2, 16, seed=4),
        normal(B, 2, 16, seed=5),
        normal(U, 4, 8, 16, seed=6, dtype=torch.float32),
        SLOTS_B.clone(),
    )


def _gdn(q_BGK: Tensor, k_BGK: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    return (gdn_step(l2_norm(q_BGK.float(), 1e-6), l2_norm(k_BGK.float(), 1e-6), *operands),)


def _gdn_arguments() -> tuple[Tensor, ...]:
    return (
        normal(B, 2, 16, seed=1),
        normal(B, 2, 16, seed=2),
        normal(B, 4, 12, seed=3),
        -normal(B, 4, seed=4, dtype=torch.float32).exp(),
        normal(B, 4, seed=5, dtype=torch.float32).sigmoid(),
        normal(U, 4, 12, 16, seed=6, dtype=torch.float32),
        SLOTS_B.clone(),
    )


def _attention(q_BHD: Tensor, key_BGD: Tensor, value_BGD: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
    k_pool, v_pool, kv_slots_B, table, rows_B, context_lens_B = memory
    k_pool.index_put_((kv_slots_B,), key_BGD)
    v_pool.index_put_((kv_slots_B,), value_BGD)
    return (decode_attention(q_BHD, k_pool, v_pool, table, rows_B, context_lens_B, CONTEXT, scale=0.25),)


def _attention_arguments() -> tuple[Tensor, ...]:
    context_lens_B = torch.tensor([17, 1, CONTEXT])
    rows_B = torch.tensor([2, 0, 1])
    table = torch.zeros(3, CONTEXT, dtype=torch.int32)
    table[1:] = 1 + torch.randperm(T - 1, generator=torch.Generator().manual_seed(0))[: 2 * CONTEXT].view(2, -1).int()
    return (
        normal(B, 4, 16, seed=1),
        normal(B, 2, 16, seed=2),
        normal(B, 2, 16, seed=3),
        normal(T, 2, 16, seed=4),
        normal(T, 2, 16, seed=5),
        table[rows_B, context_lens_B - 1].long(),
        table,
        rows_B,
        context_lens_B,
    )


def _mlp(x_BD: Tensor, norm_D: Tensor, gate_up_FD: Tensor, down_DF: Tensor) -> tuple[Tensor, ...]:
    gate_BF, up_BF = linear(rms_norm(x_BD, norm_D, 1e-6), gate_up_FD).chunk(2, dim=-1)
    return (x_BD + linear(silu(gate_BF) * up_BF, down_DF),)


def _mlp_arguments() -> tuple[Tensor, ...]:
    return normal(B, 64, seed=1), normal(64, seed=2), normal(192, 64, seed=3), normal(64, 96, seed=4)


def _head(x_BD: Tensor, norm_D: Tensor, embedding_VD: Tensor, tokens_B: Tensor) -> tuple[Tensor, ...]:
    tokens_B.copy_(linear(rms_norm(x_BD, norm_D, 1e-6), embedding_VD).argmax(-1))
    return (embedding(tokens_B, embedding_VD),)


def _head_arguments() -> tuple[Tensor, ...]:
    return normal(B, 64, seed=1), normal(64, seed=2), normal(300, 64, seed=3), torch.zeros(B, dtype=torch.int64)


SMALL_STEPS: Mapping[str, SmallStep] = {
    "conv": SmallStep(_conv, _conv_arguments),
    "mamba2": SmallStep(_mamba2, _mamba2_arguments),
    "gdn": SmallStep(_gdn, _gdn_arguments),
    "attention": SmallStep(_attention, _attention_arguments),
    "mlp": SmallStep(_mlp, _mlp_arguments),
    "head": SmallStep(_head, _head_arguments),
}


def widened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers in float64."""
    return tuple(value.double() if value.is_floating_point() else value.clone() for value in arguments)

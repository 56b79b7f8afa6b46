"""Calls of single operations, at the sizes of a model of a few hundred million parameters.

A model calls an operation at each of its depths, on other weights and pools each time, so nothing is left in a cache
from the call before. Hence `NUM_DEPTHS` sets of operands, to be called in turn. Slots are scattered over pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.ragged import RaggedLayout


@dataclass(frozen=True)
class Shape:
    """Sizes of a Mamba-2 model with attention layers."""

    hidden: int
    mlp: int
    vocab: int
    heads: int
    head_dim: int
    state_dim: int
    query_heads: int
    key_heads: int
    key_dim: int
    context_len: int
    prompt_len: int
    num_depths: int

    @property
    def conv_channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.state_dim

    @property
    def mamba_inputs(self) -> int:
        return self.heads * self.head_dim + self.conv_channels + self.heads


SHAPES = {
    "granite": Shape(768, 2048, 100352, 48, 32, 128, 12, 4, 64, context_len=640, prompt_len=512, num_depths=28),
    "small": Shape(32, 64, 128, 4, 16, 16, 4, 2, 16, context_len=40, prompt_len=24, num_depths=2),
}


@dataclass(frozen=True)
class OpCase:
    """`operation`: the field of `Kernels`; `arguments`: one tuple per depth; `num_bytes`: what a call has to move."""

    name: str
    operation: str
    rows: int
    arguments: tuple[tuple[Any, ...], ...]
    num_bytes: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Maker:
    """Makes operands: weights and activations in `dtype`, states and time steps in float32."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def decode_cases(self, batch: int) -> Iterator[OpCase]:
        """One token of each of `batch` rows."""
        shape = self.shape
        for name, outputs, inputs, num_weights in (
            ("linear, mixer in", shape.mamba_inputs, shape.hidden, shape.num_depths),
            ("linear, mixer out", shape.hidden, shape.heads * shape.head_dim, shape.num_depths),
            ("linear, gate and up", 2 * shape.mlp, shape.hidden, shape.num_depths),
            ("linear, down", shape.hidden, shape.mlp, shape.num_depths),
            ("linear, logits", shape.vocab, shape.hidden, 2),
        ):
            yield self._linear(name, batch, outputs, inputs, num_weights)
        yield self._conv_step(batch)
        yield self._mamba2_step(batch)
        yield self._decode_attention(batch)
        yield self._draw_tokens(batch)

    def prefill_cases(self) -> Iterator[OpCase]:
        """One prompt."""
        shape, rows = self.shape, self.shape.prompt_len
        layout = RaggedLayout.build([rows], device=self.device)
        x_LD = self._normal(rows, shape.conv_channels)
        weights = (self._normal(shape.conv_channels, 4), self._normal(shape.conv_channels))
        arguments = (x_LD, *weights, self._normal(1, 3, shape.conv_channels), layout)
        yield OpCase("causal_conv", "causal_conv", rows, (arguments,), 2 * x_LD.nbytes)
        x_LHP, b_LGN = self._state(rows, shape.heads, shape.head_dim), self._state(rows, 1, shape.state_dim)
        h0_SHPN = self._state(1, shape.heads, shape.head_dim, shape.state_dim)
        operands = (x_LHP, self._state(rows, shape.heads).abs(), -self._state(shape.heads).abs(), b_LGN, b_LGN.clone())
        num_bytes = 2 * x_LHP.nbytes + 2 * b_LGN.nbytes + 2 * h0_SHPN.nbytes
        yield OpCase("mamba2_chunked", "mamba2_chunked", rows, ((*operands, h0_SHPN, layout),), num_bytes)

    def _linear(self, name: str, rows: int, outputs: int, inputs: int, num_weights: int) -> OpCase:
        x, weights = self._normal(rows, inputs), [self._normal(outputs, inputs) for _ in range(num_weights)]
        num_bytes = weights[0].nbytes + x.nbytes + rows * outputs * x.itemsize
        return OpCase(name, "linear", rows, tuple((x, weight) for weight in weights), num_bytes)

    def _conv_step(self, rows: int) -> OpCase:
        channels = self.shape.conv_channels
        x_BD, slots_B = self._normal(rows, channels), self._slots(rows)
        arguments = tuple(
            (x_BD, self._normal(channels, 4), self._normal(channels), self._normal(2 * rows + 1, 3, channels), slots_B)
            for _ in range(self.shape.num_depths)
        )
        weights = 5 * channels * x_BD.itemsize
        return OpCase("conv_step", "conv_step", rows, arguments, (2 + 2 * 3) * x_BD.nbytes + weights)

    def _mamba2_step(self, rows: int) -> OpCase:
        shape = self.shape
        x_BHP, dt_BH = self._state(rows, shape.heads, shape.head_dim), self._state(rows, shape.heads).abs()
        a_H, b_BGN = -self._state(shape.heads).abs(), self._state(rows, 1, shape.state_dim)
        pools = [
            self._state(2 * rows + 1, shape.heads, shape.head_dim, shape.state_dim) for _ in range(shape.num_depths)
        ]
        slots_B = self._slots(rows)
        arguments = tuple((x_BHP, dt_BH, a_H, b_BGN, b_BGN.clone(), pool, slots_B) for pool in pools)
        num_bytes = 2 * rows * pools[0][0].nbytes + 2 * x_BHP.nbytes + 2 * b_BGN.nbytes
        return OpCase("mamba2_step", "mamba2_step", rows, arguments, num_bytes)

    def _decode_attention(self, rows: int) -> OpCase:
        shape = self.shape
        q_BHD = self._normal(rows, shape.query_heads, shape.key_dim)
        num_slots = rows * shape.context_len
        table = torch.zeros(rows + 1, shape.context_len, dtype=torch.int32)
        table[1:] = (torch.randperm(num_slots) + 1).view(rows, -1)
        rows_B = torch.arange(1, rows + 1, device=self.device)
        lens_B = torch.full_like(rows_B, shape.context_len)
        pools = [
            tuple(self._normal(num_slots + 1, shape.key_heads, shape.key_dim) for _ in range(2))
            for _ in range(max(1, shape.num_depths // 7))  # there are few attention layers
        ]
        indices = (table.to(self.device), rows_B, lens_B, shape.context_len)
        num_bytes = 2 * num_slots * pools[0][0][0].nbytes + 2 * q_BHD.nbytes
        arguments = tuple((q_BHD, *pool, *indices) for pool in pools)
        return OpCase("decode_attention", "decode_attention", rows, arguments, num_bytes, {"scale": 0.125})

    def _draw_tokens(self, rows: int) -> OpCase:
        """From the most likely tokens that hold nine tenths of the probability."""
        logits_BV, ones_B = (
            self._state(rows, self.shape.vocab),
            torch.ones(rows, dtype=torch.float64, device=self.device),
        )
        keys_B = torch.arange(rows, device=self.device)
        options = DrawInputs(0.8 * ones_B, 0 * ones_B, keys_B + self.shape.vocab, 0.9 * ones_B, keys_B, keys_B, keys_B)
        return OpCase("draw_tokens", "draw_tokens", rows, ((logits_BV, options),), logits_BV.nbytes)

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes).to(device=self.device, dtype=self.dtype)

    def _state(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes).to(self.device)

    def _slots(self, rows: int) -> Tensor:
        return (torch.randperm(2 * rows)[:rows] + 1).to(self.device)

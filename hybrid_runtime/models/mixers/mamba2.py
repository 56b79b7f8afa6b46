"""Mamba-2 (arXiv:2405.21060).

Shapes: N tokens or rows (L in prefill, B in decode), D hidden size, H heads, P head dim, G groups, S state dim,
C conv channels. (In `ops/mamba2.py` the state dim is N.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import softplus

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs
from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.models.mixers.base import MixerMemory, RecurrentMixer, write_slots
from hybrid_runtime.models.mixers.short_conv import WINDOW, ShortConv
from hybrid_runtime.models.spec import Mamba2Spec
from hybrid_runtime.models.weights import Linear
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import gated_rms_norm
from hybrid_runtime.ops.ragged import state_dtype_for

STATE = "ssm"


@dataclass(frozen=True)
class Mamba2Weights:
    """`input` yields the output gate, the conv channels (x, B, C), then one time step per head."""

    input: Linear
    conv: ShortConv
    time_step_bias_H: Tensor
    log_decay_rate_H: Tensor
    skip_H: Tensor
    norm: Tensor  # [H * P]
    output: Linear


class _Operands(NamedTuple):
    """What the recurrence reads, in state arithmetic; the time step is final."""

    x_NHP: Tensor
    dt_NH: Tensor
    a_H: Tensor
    b_NGS: Tensor
    c_NGS: Tensor


class Mamba2Mixer(RecurrentMixer):
    """State: the conv window `conv` and the SSM state `ssm` `[H, P, S]`."""

    def __init__(self, spec: Mamba2Spec, weights: Mamba2Weights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels

    def state_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype) -> LayerSpec:
        spec = self.spec
        return {
            WINDOW: self.weights.conv.window_spec(dtype),
            STATE: TensorSpec((spec.num_heads, spec.head_dim, spec.state_dim), state_dtype),
        }

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        gate, xbc_LC, dt_LH = self._project(x_LD)
        operands = self._operands(self.weights.conv.prefill(self.kernels, xbc_LC, inputs, memory), dt_LH)
        pool = memory.tensors[STATE]
        y_LHP, states_RHPS = self.kernels.mamba2_chunked(*operands, pool[inputs.working_slots_S], inputs.layout)
        write_slots(pool, inputs.state_slots_R, states_RHPS)
        return self._output(y_LHP, operands.x_NHP, gate, x_LD.dtype)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        gate, xbc_BC, dt_BH = self._project(x_BD)
        operands = self._operands(self.weights.conv.decode(self.kernels, xbc_BC, inputs, memory), dt_BH)
        y_BHP = self.kernels.mamba2_step(*operands, memory.tensors[STATE], inputs.working_slots_B)
        return self._output(y_BHP, operands.x_NHP, gate, x_BD.dtype)

    def _project(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        inner = spec.num_heads * spec.head_dim
        num_channels = inner + 2 * spec.num_groups * spec.state_dim
        gate, xbc_NC, dt_NH = self.kernels.linear(x_ND, *self.weights.input).split(
            [inner, num_channels, spec.num_heads], dim=-1
        )
        return gate, xbc_NC, dt_NH

    def _operands(self, xbc_NC: Tensor, dt_NH: Tensor) -> _Operands:
        spec, weights = self.spec, self.weights
        dtype = state_dtype_for(xbc_NC)
        num_x, num_b = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_dim
        x, b, c = xbc_NC.to(dtype).split([num_x, num_b, num_b], dim=-1)
        dt_NH = softplus(dt_NH.to(dtype) + weights.time_step_bias_H.to(dtype))
        return _Operands(
            x_NHP=rearrange(x, "n (h p) -> n h p", h=spec.num_heads),
            dt_NH=dt_NH.clamp(spec.min_time_step, spec.max_time_step),
            a_H=-weights.log_decay_rate_H.to(dtype).exp(),
            b_NGS=rearrange(b, "n (g s) -> n g s", g=spec.num_groups),
            c_NGS=rearrange(c, "n (g s) -> n g s", g=spec.num_groups),
        )

    def _output(self, y_NHP: Tensor, x_NHP: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        spec = self.spec
        y_NHP = y_NHP + self.weights.skip_H.to(y_NHP.dtype)[:, None] * x_NHP
        normed = gated_rms_norm(
            rearrange(y_NHP, "n h p -> n (h p)"),
            gate,
            self.weights.norm,
            spec.norm_eps,
            activation="silu",
            norm_before_gate=False,
            group_size=spec.num_heads * spec.head_dim // spec.num_groups,
        )
        return self.kernels.linear(normed.to(dtype), *self.weights.output)

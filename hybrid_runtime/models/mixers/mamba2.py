"""Mamba-2 (arXiv:2405.21060).

Shapes: N tokens, rows or nodes (L in prefill, B in decode, B trees of T nodes in verify), D hidden size, H heads, P
head dim, G groups, S state dim, C conv channels. (In `ops/mamba2.py` the state dim is N.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import softplus

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.models.mixers.base import MixerMemory, write_slots
from hybrid_runtime.models.mixers.recurrent import RecurrentMixer
from hybrid_runtime.models.mixers.short_conv import WINDOW, ShortConv
from hybrid_runtime.models.rollback import Rollback, TreeForms
from hybrid_runtime.models.spec import Mamba2Spec
from hybrid_runtime.models.tree_forms import Mamba2Forms, decay_rate
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
    """What the recurrence reads; time step, which is final, and rate are in state arithmetic."""

    x_NHP: Tensor
    dt_NH: Tensor
    a_H: Tensor
    b_NGS: Tensor
    c_NGS: Tensor


class Mamba2Mixer(RecurrentMixer):
    """State: the conv window `conv` and the SSM state `ssm` `[H, P, S]`."""

    state_name = STATE

    def __init__(self, spec: Mamba2Spec, weights: Mamba2Weights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self.tree_forms: TreeForms = Mamba2Forms(
            kernels.mamba2_tree,
            kernels.mamba2_fold,
            kernels.mamba2_tree_states,
            kernels.mamba2_step,
            spec.num_heads,
            spec.head_dim,
            spec.num_groups,
            spec.state_dim,
            weights.log_decay_rate_H,
        )

    def state_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype) -> LayerSpec:
        spec = self.spec
        return {
            WINDOW: self.weights.conv.window_spec(dtype),
            STATE: TensorSpec((spec.num_heads, spec.head_dim, spec.state_dim), state_dtype),
        }

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        gate, xbc_LC, dt_LH = self._project(x_LD)
        # Not widened: kernels may multiply bfloat16, at twice the rate of floats.
        operands = self._operands(self.weights.conv.prefill(self.kernels, xbc_LC, inputs, memory), dt_LH)
        pool = memory.tensors[STATE]
        y_LHP, states_RHPS = self.kernels.mamba2_chunked(*operands, pool[inputs.working_slots_S], inputs.layout)
        write_slots(pool, inputs.state_slots_R, states_RHPS)
        return self._output(y_LHP, operands.x_NHP, gate, x_LD.dtype)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        gate, xbc_BC, dt_BH = self._project(x_BD)
        operands = self._operands(_widened(self.weights.conv.decode(self.kernels, xbc_BC, inputs, memory)), dt_BH)
        y_BHP = self.kernels.mamba2_step(*operands, memory.tensors[STATE], inputs.working_slots_B)
        return self._output(y_BHP, operands.x_NHP, gate, x_BD.dtype)

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory, rollback: Rollback) -> Tensor:
        gate, xbc_NC, dt_NH = self._project(x_ND)
        operands = self._operands(_widened(self.weights.conv.verify(self.kernels, xbc_NC, inputs, memory)), dt_NH)
        to_trees = "(b t) ... -> b t ..."
        x_BTHP, dt_BTH, b_BTGS, c_BTGS = (
            rearrange(operand, to_trees, t=inputs.num_nodes)
            for operand in (operands.x_NHP, operands.dt_NH, operands.b_NGS, operands.c_NGS)
        )
        of_trees = _Operands(x_BTHP, dt_BTH, operands.a_H, b_BTGS, c_BTGS)
        y_BTHP = rollback.verify(self.tree_forms, of_trees, memory.tensors[STATE], inputs, memory.records)
        return self._output(y_BTHP.flatten(0, 1), operands.x_NHP, gate, x_ND.dtype)

    @property
    def conv(self) -> ShortConv:
        return self.weights.conv

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
        x, b, c = xbc_NC.split([num_x, num_b, num_b], dim=-1)
        dt_NH = softplus(dt_NH.to(dtype) + weights.time_step_bias_H.to(dtype))
        return _Operands(
            x_NHP=rearrange(x, "n (h p) -> n h p", h=spec.num_heads),
            dt_NH=dt_NH.clamp(spec.min_time_step, spec.max_time_step),
            a_H=decay_rate(weights.log_decay_rate_H),
            b_NGS=rearrange(b, "n (g s) -> n g s", g=spec.num_groups),
            c_NGS=rearrange(c, "n (g s) -> n g s", g=spec.num_groups),
        )

    def _output(self, y_NHP: Tensor, x_NHP: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        spec = self.spec
        skip_H = self.weights.skip_H.to(state_dtype_for(y_NHP))
        y_NHP = y_NHP + skip_H[:, None] * x_NHP
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


def _widened(x: Tensor) -> Tensor:
    return x.to(state_dtype_for(x))

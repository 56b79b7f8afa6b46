"""Kimi delta attention (Kimi Linear, arXiv:2510.26692): delta rule with a decay per key channel.

Shapes: N tokens, rows or nodes (L in prefill, B in decode, B trees of T nodes in verify), D hidden size, H heads, K key
dim, V value dim, C conv channels.
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
from hybrid_runtime.models.spec import KdaSpec
from hybrid_runtime.models.tree_forms import DeltaForms
from hybrid_runtime.models.weights import Linear
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import gated_rms_norm, l2_norm
from hybrid_runtime.ops.ragged import state_dtype_for

QK_EPS = 1e-6  # as in flash-linear-attention, whose kernels these models were trained with
STATE = "kda"


@dataclass(frozen=True)
class KdaWeights:
    """`decay` and `gate` are low-rank: two maps in a row. `dt_bias_HK` shifts the decay before its softplus."""

    query: Linear
    key: Linear
    value: Linear
    conv: ShortConv  # over query, key and value channels, in this order
    decay: tuple[Linear, Linear]
    dt_bias_HK: Tensor
    log_decay_rate_H: Tensor
    beta: Linear
    gate: tuple[Linear, Linear]
    norm_V: Tensor
    output: Linear


class _Operands(NamedTuple):
    """What the delta rule reads, in state arithmetic; the query is scaled, query and key are normalised."""

    query_NHK: Tensor
    key_NHK: Tensor
    value_NHV: Tensor
    log_a_NHK: Tensor
    beta_NH: Tensor


class KdaMixer(RecurrentMixer):
    """State: the conv window `conv` and the delta-rule state `kda` `[H, V, K]`."""

    state_name = STATE

    def __init__(self, spec: KdaSpec, weights: KdaWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self.tree_forms: TreeForms = DeltaForms(
            kernels.kda_tree,
            kernels.kda_fold,
            kernels.kda_tree_states,
            kernels.kda_step,
            spec.num_heads,
            spec.num_heads,
            spec.key_dim,
            spec.value_dim,
            (spec.num_heads, spec.key_dim),
        )

    def state_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype) -> LayerSpec:
        spec = self.spec
        return {
            WINDOW: self.weights.conv.window_spec(dtype),
            STATE: TensorSpec((spec.num_heads, spec.value_dim, spec.key_dim), state_dtype),
        }

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        qkv_LC = self.weights.conv.prefill(self.kernels, self._project(x_LD), inputs, memory)
        pool = memory.tensors[STATE]
        y_LHV, states_RHVK = self.kernels.kda_chunked(
            *self._operands(x_LD, qkv_LC), pool[inputs.working_slots_S], inputs.layout
        )
        write_slots(pool, inputs.state_slots_R, states_RHVK)
        return self._output(x_LD, y_LHV)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        qkv_BC = self.weights.conv.decode(self.kernels, self._project(x_BD), inputs, memory)
        y_BHV = self.kernels.kda_step(*self._operands(x_BD, qkv_BC), memory.tensors[STATE], inputs.working_slots_B)
        return self._output(x_BD, y_BHV)

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory, rollback: Rollback) -> Tensor:
        qkv_NC = self.weights.conv.verify(self.kernels, self._project(x_ND), inputs, memory)
        operands = self._operands(x_ND, qkv_NC)
        of_trees = _Operands(*(rearrange(x_N, "(b t) ... -> b t ...", t=inputs.num_nodes) for x_N in operands))
        y_BTHV = rollback.verify(self.tree_forms, of_trees, memory.tensors[STATE], inputs, memory.records)
        return self._output(x_ND, y_BTHV.flatten(0, 1))

    @property
    def conv(self) -> ShortConv:
        return self.weights.conv

    def _project(self, x_ND: Tensor) -> Tensor:
        weights = self.weights
        maps = (weights.query, weights.key, weights.value)
        return torch.cat([self.kernels.linear(x_ND, *part) for part in maps], dim=-1)

    def _operands(self, x_ND: Tensor, qkv_NC: Tensor) -> _Operands:
        spec, weights = self.spec, self.weights
        dtype = state_dtype_for(x_ND)
        num_keys, num_values = spec.num_heads * spec.key_dim, spec.num_heads * spec.value_dim
        query_NC, key_NC, value_NC = qkv_NC.to(dtype).split([num_keys, num_keys, num_values], dim=-1)
        to_heads = "n (h c) -> n h c"
        raw_NHK = rearrange(self._in_two_steps(x_ND, weights.decay).to(dtype), to_heads, h=spec.num_heads)
        rate_H1 = weights.log_decay_rate_H.to(dtype).exp()[:, None]
        return _Operands(
            query_NHK=l2_norm(rearrange(query_NC, to_heads, h=spec.num_heads), QK_EPS) * spec.key_dim**-0.5,
            key_NHK=l2_norm(rearrange(key_NC, to_heads, h=spec.num_heads), QK_EPS),
            value_NHV=rearrange(value_NC, to_heads, h=spec.num_heads),
            log_a_NHK=-rate_H1 * softplus(raw_NHK + weights.dt_bias_HK.to(dtype)),
            beta_NH=self.kernels.linear(x_ND, *weights.beta).to(dtype).sigmoid(),
        )

    def _output(self, x_ND: Tensor, y_NHV: Tensor) -> Tensor:
        gate_NHV = rearrange(self._in_two_steps(x_ND, self.weights.gate), "n (h v) -> n h v", h=self.spec.num_heads)
        normed_NHV = gated_rms_norm(
            y_NHV, gate_NHV, self.weights.norm_V, self.spec.norm_eps, activation="sigmoid", norm_before_gate=True
        )
        return self.kernels.linear(rearrange(normed_NHV, "n h v -> n (h v)").to(x_ND.dtype), *self.weights.output)

    def _in_two_steps(self, x_ND: Tensor, maps: tuple[Linear, Linear]) -> Tensor:
        return self.kernels.linear(self.kernels.linear(x_ND, *maps[0]), *maps[1])

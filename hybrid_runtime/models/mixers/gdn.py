"""Gated DeltaNet (arXiv:2412.06464): delta rule with a scalar decay per value head.

Shapes: N tokens, rows or nodes (L in prefill, B in decode, B trees of T nodes in verify), D hidden size, G key heads, H
value heads, J value heads per key head, K key dim, V value dim, C conv channels.
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
from hybrid_runtime.models.spec import GdnSpec
from hybrid_runtime.models.tree_forms import DeltaForms
from hybrid_runtime.models.weights import Linear
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import gated_rms_norm, l2_norm
from hybrid_runtime.ops.ragged import state_dtype_for

QK_EPS = 1e-6  # as in flash-linear-attention, whose kernels these models were trained with
STATE = "gdn"


@dataclass(frozen=True)
class GdnWeights:
    """The two input maps are laid out per key head: `qkvz` yields its query, its key, the values and then the output
    gates of its value heads; `ba` yields the betas, then the raw decays, of its value heads.
    """

    qkvz: Linear
    ba: Linear
    conv: ShortConv  # over query, key and value channels, in this order
    decay_bias_H: Tensor
    log_decay_rate_H: Tensor
    norm_V: Tensor
    output: Linear


class _Projected(NamedTuple):
    qkv_NC: Tensor
    gate_NHV: Tensor
    beta_NH: Tensor  # before its sigmoid
    decay_NH: Tensor  # before bias and softplus


class _Operands(NamedTuple):
    """What the delta rule reads, in state arithmetic; the query is scaled, query and key are normalised."""

    query_NGK: Tensor
    key_NGK: Tensor
    value_NHV: Tensor
    log_a_NH: Tensor
    beta_NH: Tensor


class GdnMixer(RecurrentMixer):
    """State: the conv window `conv` and the delta-rule state `gdn` `[H, V, K]`."""

    state_name = STATE

    def __init__(self, spec: GdnSpec, weights: GdnWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self.tree_forms: TreeForms = DeltaForms(
            kernels.gdn_tree,
            kernels.gdn_fold,
            kernels.gdn_tree_states,
            kernels.gdn_step,
            spec.num_key_heads,
            spec.num_value_heads,
            spec.key_dim,
            spec.value_dim,
            (spec.num_value_heads,),
        )

    def state_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype) -> LayerSpec:
        spec = self.spec
        return {
            WINDOW: self.weights.conv.window_spec(dtype),
            STATE: TensorSpec((spec.num_value_heads, spec.value_dim, spec.key_dim), state_dtype),
        }

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        projected = self._project(x_LD)
        operands = self._operands(projected, self.weights.conv.prefill(self.kernels, projected.qkv_NC, inputs, memory))
        pool = memory.tensors[STATE]
        y_LHV, states_RHVK = self.kernels.gdn_chunked(*operands, pool[inputs.working_slots_S], inputs.layout)
        write_slots(pool, inputs.state_slots_R, states_RHVK)
        return self._output(y_LHV, projected.gate_NHV, x_LD.dtype)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        projected = self._project(x_BD)
        operands = self._operands(projected, self.weights.conv.decode(self.kernels, projected.qkv_NC, inputs, memory))
        y_BHV = self.kernels.gdn_step(*operands, memory.tensors[STATE], inputs.working_slots_B)
        return self._output(y_BHV, projected.gate_NHV, x_BD.dtype)

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory, rollback: Rollback) -> Tensor:
        projected = self._project(x_ND)
        operands = self._operands(projected, self.weights.conv.verify(self.kernels, projected.qkv_NC, inputs, memory))
        of_trees = _Operands(*(rearrange(x_N, "(b t) ... -> b t ...", t=inputs.num_nodes) for x_N in operands))
        y_BTHV = rollback.verify(self.tree_forms, of_trees, memory.tensors[STATE], inputs, memory.records)
        return self._output(y_BTHV.flatten(0, 1), projected.gate_NHV, x_ND.dtype)

    @property
    def conv(self) -> ShortConv:
        return self.weights.conv

    def _project(self, x_ND: Tensor) -> _Projected:
        spec = self.spec
        per_key = spec.num_value_heads // spec.num_key_heads
        num_values = per_key * spec.value_dim
        by_key_head = "n (g c) -> n g c"
        query, key, value, gate = rearrange(
            self.kernels.linear(x_ND, *self.weights.qkvz), by_key_head, g=spec.num_key_heads
        ).split([spec.key_dim, spec.key_dim, num_values, num_values], dim=-1)
        beta, decay = rearrange(self.kernels.linear(x_ND, *self.weights.ba), by_key_head, g=spec.num_key_heads).split(
            per_key, dim=-1
        )
        return _Projected(
            qkv_NC=torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1),
            gate_NHV=rearrange(gate, "n g (j v) -> n (g j) v", j=per_key),
            beta_NH=beta.flatten(1),
            decay_NH=decay.flatten(1),
        )

    def _operands(self, projected: _Projected, qkv_NC: Tensor) -> _Operands:
        spec, weights = self.spec, self.weights
        dtype = state_dtype_for(qkv_NC)
        num_keys = spec.num_key_heads * spec.key_dim
        query_NC, key_NC, value_NC = qkv_NC.to(dtype).split(
            [num_keys, num_keys, spec.num_value_heads * spec.value_dim], dim=-1
        )
        rate_H = weights.log_decay_rate_H.to(dtype).exp()
        raw_NH = projected.decay_NH.to(dtype) + weights.decay_bias_H.to(dtype)
        return _Operands(
            query_NGK=l2_norm(rearrange(query_NC, "n (g k) -> n g k", k=spec.key_dim), QK_EPS) * spec.key_dim**-0.5,
            key_NGK=l2_norm(rearrange(key_NC, "n (g k) -> n g k", k=spec.key_dim), QK_EPS),
            value_NHV=rearrange(value_NC, "n (h v) -> n h v", v=spec.value_dim),
            log_a_NH=-rate_H * softplus(raw_NH),
            beta_NH=projected.beta_NH.to(dtype).sigmoid(),
        )

    def _output(self, y_NHV: Tensor, gate_NHV: Tensor, dtype: torch.dtype) -> Tensor:
        normed_NHV = gated_rms_norm(
            y_NHV, gate_NHV, self.weights.norm_V, self.spec.norm_eps, activation="silu", norm_before_gate=True
        )
        return self.kernels.linear(rearrange(normed_NHV, "n h v -> n (h v)").to(dtype), *self.weights.output)

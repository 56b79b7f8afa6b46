"""Grouped-query attention over the KV pool: optional rotary positions, query and key norms, output gate, window.

Shapes: N tokens, rows or nodes (L in prefill, B in decode, B trees of T nodes in verify), D hidden size, H query heads,
G KV heads, K head dim, V value dim, F rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.models.mixers.base import AttentionMixer, MixerMemory, write_node_entries, write_slots
from hybrid_runtime.models.spec import AttentionSpec
from hybrid_runtime.models.weights import Linear
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import rms_norm
from hybrid_runtime.ops.rope import apply_rope, rope_cos_sin

KEY, VALUE = "k", "v"
Rotation = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class AttentionWeights:
    """`query` yields, per head, the query and then the output gate, where the spec has one."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm_K: Tensor | None = None
    key_norm_K: Tensor | None = None
    inv_freq_F: Tensor | None = None


class GqaMixer(AttentionMixer):
    """KV: `k` `[G, K]` after norm and rotation, `v` `[G, V]`."""

    def __init__(self, spec: AttentionSpec, weights: AttentionWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels

    def kv_tensors(self, dtype: torch.dtype) -> LayerSpec:
        spec = self.spec
        return {
            KEY: TensorSpec((spec.num_kv_heads, spec.head_dim), dtype),
            VALUE: TensorSpec((spec.num_kv_heads, spec.value_dim), dtype),
        }

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        rotation = self._rotation(inputs.positions_L, x_LD.dtype)
        query_LHK, gate_LHV = self._query(x_LD, rotation)
        self._write_kv(x_LD, rotation, inputs.kv_slots_L, memory)
        y_LHV = self.kernels.prefill_attention(
            query_LHK,
            memory.tensors[KEY],
            memory.tensors[VALUE],
            memory.req_to_token,
            inputs.request_rows_S,
            inputs.context_lens_S,
            inputs.layout,
            scale=self.spec.scale,
            window=self.spec.window,
        )
        return self._output(y_LHV, gate_LHV, x_LD.dtype)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        rotation = self._rotation(inputs.positions_B, x_BD.dtype)
        query_BHK, gate_BHV = self._query(x_BD, rotation)
        self._write_kv(x_BD, rotation, inputs.kv_slots_B, memory)
        y_BHV = self.kernels.decode_attention(
            query_BHK,
            memory.tensors[KEY],
            memory.tensors[VALUE],
            memory.req_to_token,
            inputs.request_rows_B,
            inputs.context_lens_B,
            inputs.max_context_len,
            scale=self.spec.scale,
            window=self.spec.window,
        )
        return self._output(y_BHV, gate_BHV, x_BD.dtype)

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory) -> Tensor:
        rotation = self._rotation(inputs.positions_BT.flatten(), x_ND.dtype)
        query_NHK, gate_NHV = self._query(x_ND, rotation)
        self._write_kv(x_ND, rotation, inputs.kv_slots_BT.flatten(), memory, write_node_entries)
        y_BTHV = self.kernels.tree_attention(
            rearrange(query_NHK, "(b t) h k -> b t h k", t=inputs.num_nodes),
            memory.tensors[KEY],
            memory.tensors[VALUE],
            memory.req_to_token,
            inputs.request_rows_B,
            inputs.committed_lens_B,
            inputs.max_context_len,
            inputs.kv_slots_BT,
            inputs.tree,
            scale=self.spec.scale,
            window=self.spec.window,
        )
        return self._output(y_BTHV.flatten(0, 1), gate_NHV, x_ND.dtype)

    def _rotation(self, positions_N: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines for the given positions; None without rotary positions."""
        rope = self.spec.rope
        if rope is None:
            return None
        assert self.weights.inv_freq_F is not None
        return rope_cos_sin(positions_N, self.weights.inv_freq_F, rope.attention_scaling, dtype)

    def _query(self, x_ND: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        query_NHK = rearrange(self.kernels.linear(x_ND, *self.weights.query), "n (h k) -> n h k", h=spec.num_heads)
        gate_NHV = None
        if spec.output_gate:
            query_NHK, gate_NHV = query_NHK.split([spec.head_dim, spec.value_dim], dim=-1)
        return self._norm_and_rotate(query_NHK, self.weights.query_norm_K, rotation), gate_NHV

    def _write_kv(
        self,
        x_ND: Tensor,
        rotation: Rotation,
        kv_slots_N: Tensor,
        memory: MixerMemory,
        write: Callable[[Tensor, Tensor, Tensor], None] = write_slots,
    ) -> None:
        weights, num_kv_heads = self.weights, self.spec.num_kv_heads
        key_NGK = rearrange(self.kernels.linear(x_ND, *weights.key), "n (g k) -> n g k", g=num_kv_heads)
        key_NGK = self._norm_and_rotate(key_NGK, weights.key_norm_K, rotation)
        value_NGV = rearrange(self.kernels.linear(x_ND, *weights.value), "n (g v) -> n g v", g=num_kv_heads)
        write(memory.tensors[KEY], kv_slots_N, key_NGK)
        write(memory.tensors[VALUE], kv_slots_N, value_NGV)

    def _norm_and_rotate(self, x_NHK: Tensor, norm_K: Tensor | None, rotation: Rotation) -> Tensor:
        if norm_K is not None:
            assert self.spec.qk_norm is not None
            x_NHK = rms_norm(x_NHK, norm_K, self.spec.qk_norm.eps, offset=self.spec.qk_norm.offset)
        return x_NHK if rotation is None else apply_rope(x_NHK, *rotation)

    def _output(self, y_NHV: Tensor, gate_NHV: Tensor | None, dtype: torch.dtype) -> Tensor:
        if gate_NHV is not None:
            y_NHV = y_NHV * gate_NHV.sigmoid()
        return self.kernels.linear(rearrange(y_NHV, "n h v -> n (h v)").to(dtype), *self.weights.output)

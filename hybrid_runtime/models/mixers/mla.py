"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), without rotary positions.

Shapes: N tokens, rows or nodes (L in prefill, B in decode, B trees of T nodes in verify), D hidden size, H heads, R
latent dim, C key channels expanded from the latent, E key channels that all heads share, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.models.mixers.base import AttentionMixer, MixerMemory, write_node_entries, write_slots
from hybrid_runtime.models.spec import MlaSpec
from hybrid_runtime.models.weights import Linear
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import rms_norm

LATENT = "latent"


@dataclass(frozen=True)
class MlaWeights:
    """`query` is one map, or a map down, whose result `query_norm` norms, and a map up.

    `latent` yields the latent, then the shared key channels. `expand` `[H * (C + V), R]` holds, per head, the rows that
    expand a latent to the head's key, then those that expand it to its value.
    """

    query: tuple[Linear, ...]
    query_norm: Tensor | None
    latent: Linear
    latent_norm_R: Tensor
    expand: Tensor
    output: Linear


class MlaMixer(AttentionMixer):
    """KV: `latent` `[R + E]`, the normed latent, then the shared key channels."""

    def __init__(self, spec: MlaSpec, weights: MlaWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels

    def kv_tensors(self, dtype: torch.dtype) -> LayerSpec:
        return {LATENT: TensorSpec((self.spec.latent_dim + self.spec.shared_key_dim,), dtype)}

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        pool = memory.tensors[LATENT]
        write_slots(pool, inputs.kv_slots_L, self._latent(x_LD))
        y_LHV = self.kernels.prefill_mla(
            *self._query(x_LD),
            pool,
            *self._expansions(),
            memory.req_to_token,
            inputs.request_rows_S,
            inputs.context_lens_S,
            inputs.layout,
            scale=self.spec.scale,
        )
        return self.kernels.linear(rearrange(y_LHV, "l h v -> l (h v)"), *self.weights.output)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        pool = memory.tensors[LATENT]
        write_slots(pool, inputs.kv_slots_B, self._latent(x_BD))
        y_BHV = self.kernels.decode_mla(
            *self._query(x_BD),
            pool,
            *self._expansions(),
            memory.req_to_token,
            inputs.request_rows_B,
            inputs.context_lens_B,
            inputs.max_context_len,
            scale=self.spec.scale,
        )
        return self.kernels.linear(rearrange(y_BHV, "b h v -> b (h v)"), *self.weights.output)

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory) -> Tensor:
        pool = memory.tensors[LATENT]
        write_node_entries(pool, inputs.kv_slots_BT.flatten(), self._latent(x_ND))
        to_trees = "(b t) h c -> b t h c"
        query_NHC, shared_NHE = self._query(x_ND)
        y_BTHV = self.kernels.tree_mla(
            rearrange(query_NHC, to_trees, t=inputs.num_nodes),
            rearrange(shared_NHE, to_trees, t=inputs.num_nodes),
            pool,
            *self._expansions(),
            memory.req_to_token,
            inputs.request_rows_B,
            inputs.committed_lens_B,
            inputs.max_context_len,
            inputs.kv_slots_BT,
            inputs.tree,
            scale=self.spec.scale,
        )
        return self.kernels.linear(rearrange(y_BTHV, "b t h v -> (b t) (h v)"), *self.weights.output)

    def _latent(self, x_ND: Tensor) -> Tensor:
        spec = self.spec
        latent_NR, shared_NE = self.kernels.linear(x_ND, *self.weights.latent).split(
            [spec.latent_dim, spec.shared_key_dim], dim=-1
        )
        latent_NR = rms_norm(latent_NR, self.weights.latent_norm_R, spec.latent_norm.eps)
        return torch.cat([latent_NR, shared_NE], dim=-1)

    def _query(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Queries against the expanded key channels `[N, H, C]` and against the shared ones `[N, H, E]`."""
        spec, weights = self.spec, self.weights
        query = self.kernels.linear(x_ND, *weights.query[0])
        if weights.query_norm is not None:
            assert spec.query_norm is not None
            query = self.kernels.linear(rms_norm(query, weights.query_norm, spec.query_norm.eps), *weights.query[1])
        query_NHC, shared_NHE = rearrange(query, "n (h c) -> n h c", h=spec.num_heads).split(
            [spec.key_dim, spec.shared_key_dim], dim=-1
        )
        return query_NHC, shared_NHE

    def _expansions(self) -> tuple[Tensor, Tensor]:
        """Maps from a latent to each head's key `[H, C, R]` and to its value `[H, V, R]`: views of one weight."""
        spec = self.spec
        expand_HXR = self.weights.expand.unflatten(0, (spec.num_heads, spec.key_dim + spec.value_dim))
        expand_HCR, expand_HVR = expand_HXR.split([spec.key_dim, spec.value_dim], dim=1)
        return expand_HCR, expand_HVR

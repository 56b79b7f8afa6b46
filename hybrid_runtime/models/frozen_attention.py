"""Attention that reads the KV of a target model's layer and writes none: queries and an output map, nothing else.

Shapes: N rows, D hidden size, H query heads, G KV heads, K key dim, V value dim; latent attention: R latent dim, E key
channels that all heads share, C = R + E.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from einops import rearrange
from torch import Tensor

from hybrid_runtime.models.mixers import AttentionMixer, MixerMemory
from hybrid_runtime.models.mixers.attention import KEY, VALUE, GqaMixer
from hybrid_runtime.models.mixers.mla import LATENT, MlaMixer
from hybrid_runtime.models.weights import Linear
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.rope import apply_rope, rope_cos_sin


@dataclass(frozen=True)
class FrozenAttentionWeights:
    """`query`: `[H K, D]`, or `[H C, D]` for latent attention; `output`: `[D, H V]`, or `[D, H R]`."""

    query: Linear
    output: Linear


@dataclass(frozen=True)
class FrozenContext:
    """The committed tokens that each of N rows sees. All int64; several rows may name one request."""

    positions_N: Tensor  # the rotary position of the query: the context's length
    request_rows_N: Tensor  # rows of req_to_token; padding rows: 0
    context_lens_N: Tensor  # committed tokens, at least 1
    max_context_len: int  # at least every entry of context_lens_N


class FrozenAttention(ABC):
    """Queries of its own over the KV of one attention of the target. Writes nothing."""

    def __init__(self, num_heads: int, weights: FrozenAttentionWeights, kernels: Kernels) -> None:
        self.num_heads = num_heads
        self.weights = weights
        self.kernels = kernels

    def __call__(self, x_ND: Tensor, context: FrozenContext, memory: MixerMemory) -> Tensor:
        """Output `[N, D]` for the normed stream `x_ND`; `memory`: of the target's mixer at its depth."""
        query_NHK = rearrange(self.kernels.linear(x_ND, *self.weights.query), "n (h k) -> n h k", h=self.num_heads)
        y_NHV = self._attend(query_NHK, context, memory).to(x_ND.dtype)
        return self.kernels.linear(rearrange(y_NHV, "n h v -> n (h v)"), *self.weights.output)

    @abstractmethod
    def _attend(self, query_NHK: Tensor, context: FrozenContext, memory: MixerMemory) -> Tensor:
        """What the heads gather of the values."""


class FrozenGqa(FrozenAttention):
    """Queries in the space of the target's keys, rotated as the target's own; no norm and no gate."""

    def __init__(self, target: GqaMixer, num_heads: int, weights: FrozenAttentionWeights, kernels: Kernels) -> None:
        super().__init__(num_heads, weights, kernels)
        self.spec = target.spec
        self.inv_freq_F = target.weights.inv_freq_F

    def _attend(self, query_NHK: Tensor, context: FrozenContext, memory: MixerMemory) -> Tensor:
        rope = self.spec.rope
        if rope is not None:
            assert self.inv_freq_F is not None
            table = rope_cos_sin(context.positions_N, self.inv_freq_F, rope.attention_scaling, query_NHK.dtype)
            query_NHK = apply_rope(query_NHK, *table)
        return self.kernels.decode_attention(
            query_NHK,
            memory.tensors[KEY],
            memory.tensors[VALUE],
            memory.req_to_token,
            context.request_rows_N,
            context.context_lens_N,
            context.max_context_len,
            scale=self.spec.scale,
            window=self.spec.window,
        )


class FrozenMla(FrozenAttention):
    """Queries in the space of the latents themselves (absorbed): no key or value is expanded."""

    def __init__(self, target: MlaMixer, num_heads: int, weights: FrozenAttentionWeights, kernels: Kernels) -> None:
        super().__init__(num_heads, weights, kernels)
        self.spec = target.spec

    def _attend(self, query_NHK: Tensor, context: FrozenContext, memory: MixerMemory) -> Tensor:
        return self.kernels.decode_latents(
            query_NHK,
            memory.tensors[LATENT],
            self.spec.latent_dim,
            memory.req_to_token,
            context.request_rows_N,
            context.context_lens_N,
            context.max_context_len,
            scale=self.spec.scale,
        )


def frozen_dims(target: AttentionMixer) -> tuple[int, int]:
    """Channels of one head's query over the KV of `target`, and of what the head gathers."""
    if isinstance(target, MlaMixer):
        return target.spec.latent_dim + target.spec.shared_key_dim, target.spec.latent_dim
    assert isinstance(target, GqaMixer)
    return target.spec.head_dim, target.spec.value_dim


def build_frozen_attention(
    target: AttentionMixer, num_heads: int, weights: FrozenAttentionWeights, kernels: Kernels
) -> FrozenAttention:
    """Attention of `num_heads` heads over the KV of `target`; its kind is the target's."""
    if isinstance(target, MlaMixer):
        return FrozenMla(target, num_heads, weights, kernels)
    assert isinstance(target, GqaMixer)
    return FrozenGqa(target, num_heads, weights, kernels)

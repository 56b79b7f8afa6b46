"""Training forward of a `kimi_linear` model: the module's parameters, our arithmetic.

transformers' own fallback for KDA builds a `[.., Q, Q, K]` decay tensor and inverts row by row, many times slower on
a CPU than the rest of the model. Here matrix products run in a chosen dtype (bfloat16 where the CPU has it), everything
else in float32, and each kind of block is one compiled function, shared by all layers of that kind.

Shapes: B batch, L tokens, H heads, K key dim, P head dim, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from hybrid_runtime.training.kda_batched import chunk_outputs, chunk_states, prepare_chunks

LATENT_EPS = 1e-6  # of the norm of latents: transformers has it fixed, whatever the config says


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`x Wᵀ` with the product in `dtype`, as float32."""
    return functional.linear(x.to(dtype), weight.to(dtype)).float()


def _fused_linear(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Several projections of one input as one product."""
    return linear(x, torch.cat(list(weights)), dtype).split([weight.shape[0] for weight in weights], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis, all in the dtype of `x`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _causal_conv_silu(x_BLD: Tensor, weight_D1W: Tensor) -> Tensor:
    """Depthwise convolution over the last W tokens, written as W shifted products, which the compiler fuses."""
    width = weight_D1W.shape[-1]
    padded = functional.pad(x_BLD, (0, 0, width - 1, 0))
    taps = [padded[:, i : i + x_BLD.shape[1]] * weight_D1W[:, 0, i] for i in range(width)]
    return functional.silu(sum(taps[1:], taps[0]))


def _kda_inputs(x_BLD: Tensor, w: dict[str, Tensor], num_heads: int, eps: float, dtype: torch.dtype) -> Any:
    """Norm, projections, convolution and gates, up to what the scan over chunks needs, and the output gate."""
    x_BLD = rms_norm(x_BLD, w["input_layernorm.weight"], eps)
    names = ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj")
    *qkv, f_a, g_a, b_BLH = _fused_linear(x_BLD, [w[f"self_attn.{name}.weight"] for name in names], dtype)
    qkv_BLD = _causal_conv_silu(torch.cat(qkv, dim=-1), w["self_attn.conv1d.weight"])
    q, k, v = rearrange(qkv_BLD, "b l (three h p) -> three b l h p", three=3, h=num_heads).unbind()
    forget = linear(f_a, w["self_attn.forget_gate.f_b_proj.weight"], dtype) + w["self_attn.forget_gate.dt_bias"]
    rate_H1 = w["self_attn.forget_gate.A_log"].exp().view(num_heads, 1)
    log_a_BLHK = -rate_H1 * functional.softplus(rearrange(forget, "b l (h k) -> b l h k", h=num_heads))
    gate = linear(g_a, w["self_attn.g_b_proj.weight"], dtype)
    q = _l2_normalise(q) * q.shape[-1] ** -0.5
    return *prepare_chunks(q, _l2_normalise(k), v, log_a_BLHK, b_BLH.sigmoid()), gate


def _kda_outputs(
    x_BLD: Tensor,
    states: Tensor,
    chunks: tuple[Tensor, ...],
    gate_BLD: Tensor,
    w: dict[str, Tensor],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Read-out, gated norm and output projection of a KDA layer, then its feed-forward block."""
    o_BLHP = rms_norm(chunk_outputs(states, *chunks), w["self_attn.o_norm.weight"], eps)
    o_BLD = rearrange(o_BLHP, "b l h p -> b l (h p)") * gate_BLD.sigmoid()
    x_BLD = x_BLD + linear(o_BLD, w["self_attn.o_proj.weight"], dtype)
    return _feed_forward(x_BLD, w, eps, dtype)


def _feed_forward(x_BLD: Tensor, w: dict[str, Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    h_BLD = rms_norm(x_BLD, w["post_attention_layernorm.weight"], eps)
    gate, up = _fused_linear(h_BLD, [w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]], dtype)
    return x_BLD + linear(functional.silu(gate) * up, w["mlp.down_proj.weight"], dtype)


def _attention_layer(
    x_BLD: Tensor, w: dict[str, Tensor], num_heads: int, dims: tuple[int, int, int], eps: float, dtype: torch.dtype
) -> Tensor:
    """Multi-head latent attention without positions, then the feed-forward block. `dims`: latent, shared key, value."""
    latent_dim, shared_dim, value_dim = dims
    h_BLD = rms_norm(x_BLD, w["input_layernorm.weight"], eps)
    names = ("q_proj", "kv_a_proj_with_mqa")
    q, latent = _fused_linear(h_BLD, [w[f"self_attn.{name}.weight"] for name in names], dtype)
    q_BHLK = rearrange(q, "b l (h k) -> b h l k", h=num_heads)
    latent, k_shared = latent.split([latent_dim, shared_dim], dim=-1)
    latent = rms_norm(latent, w["self_attn.kv_a_layernorm.weight"], LATENT_EPS)
    kv = rearrange(linear(latent, w["self_attn.kv_b_proj.weight"], dtype), "b l (h p) -> b h l p", h=num_heads)
    k_BHLK, v_BHLP = kv.split([kv.shape[-1] - value_dim, value_dim], dim=-1)
    k_BHLK = torch.cat([k_BHLK, k_shared[:, None].expand(-1, num_heads, -1, -1)], dim=-1)
    # In float32: torch's CPU kernel for short sequences is slower in bfloat16.
    o = functional.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLP, is_causal=True)
    x_BLD = x_BLD + linear(rearrange(o, "b h l p -> b l (h p)"), w["self_attn.o_proj.weight"], dtype)
    return _feed_forward(x_BLD, w, eps, dtype)


def _token_losses(
    x_BLD: Tensor, norm: Tensor, head: Tensor, targets_BL: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    logits = linear(rms_norm(x_BLD, norm, eps), head, dtype)
    return functional.cross_entropy(logits.flatten(0, 1), targets_BL.flatten(), reduction="none").view_as(targets_BL)


def _latents(x_BLD: Tensor, w: dict[str, Tensor], latent_dim: int, eps: float, dtype: torch.dtype) -> Tensor:
    """What an attention layer keeps of each token: the normed latent, then the key channels that all heads share."""
    latent = linear(rms_norm(x_BLD, w["input_layernorm.weight"], eps), w["self_attn.kv_a_proj_with_mqa.weight"], dtype)
    latent, k_shared = latent.split([latent_dim, latent.shape[-1] - latent_dim], dim=-1)
    return torch.cat([rms_norm(latent, w["self_attn.kv_a_layernorm.weight"], LATENT_EPS), k_shared], dim=-1)


class TrainingForward:
    """Token losses of a `KimiLinearForCausalLM` with dense feed-forward layers, differentiable in its parameters.

    Holds the model and reads its parameters at every call. `compiled=False` runs the same functions eagerly.
    """

    def __init__(self, model: nn.Module, matmul_dtype: torch.dtype, *, compiled: bool) -> None:
        self._model = model
        self._dtype = matmul_dtype

        def maybe_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._kda_inputs = maybe_compiled(_kda_inputs)
        self._kda_outputs = maybe_compiled(_kda_outputs)
        self._attention_layer = maybe_compiled(_attention_layer)
        self._token_losses = maybe_compiled(_token_losses)

    def __call__(self, ids_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Negative log likelihood in nats of each target, `[B, L]` float32. L must be a multiple of the KDA chunk."""
        model: Any = self._model
        norm, head, eps = model.model.norm.weight, model.lm_head.weight, model.config.rms_norm_eps
        losses: Tensor = self._token_losses(self.streams(ids_BL)[-1], norm, head, targets_BL, eps, self._dtype)
        return losses

    def streams(self, ids_BL: Tensor) -> list[Tensor]:
        """The residual stream `[B, L, D]` before each layer, then the one behind the last."""
        model: Any = self._model
        config, decoder = model.config, model.model
        eps, dtype = config.rms_norm_eps, self._dtype
        x_BLD = functional.embedding(ids_BL, decoder.embed_tokens.weight)
        streams = [x_BLD]
        for layer in decoder.layers:
            w = dict(layer.named_parameters())
            if layer.block_type == "full_attention":
                dims = (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim)
                x_BLD = self._attention_layer(x_BLD, w, config.num_attention_heads, dims, eps, dtype)
            else:
                key, decay, u, wk, q, scores, gate = self._kda_inputs(x_BLD, w, config.linear_num_heads, eps, dtype)
                states = chunk_states(key, decay, u, wk)
                x_BLD = self._kda_outputs(x_BLD, states, (u, wk, q, scores), gate, w, eps, dtype)
            streams.append(x_BLD)
        return streams

    @torch.no_grad()
    def memory(self, ids_BL: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What a head that drafts for the model reads: the stream behind the last layer `[B, L, D]`, and of each
        attention layer the latents `[B, L, C]`. No gradients.
        """
        model: Any = self._model
        config, streams = model.config, self.streams(ids_BL)
        latents = tuple(
            _latents(x_BLD, dict(layer.named_parameters()), config.kv_lora_rank, config.rms_norm_eps, self._dtype)
            for layer, x_BLD in zip(model.model.layers, streams[:-1], strict=True)
            if layer.block_type == "full_attention"
        )
        return streams[-1], latents

"""Qwen3-Next (Qwen/Qwen3-Next-80B-A3B): gated DeltaNet layers with gated attention between them, mostly experts."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hybrid_runtime.models.adapters.common import (
    assemble,
    gated_mlp_weights,
    require_layer_types,
    require_silu,
    rope_of,
)
from hybrid_runtime.models.mixers.attention import AttentionWeights
from hybrid_runtime.models.mixers.gdn import GdnWeights
from hybrid_runtime.models.mixers.short_conv import ShortConv
from hybrid_runtime.models.spec import (
    AttentionSpec,
    BlockSpec,
    Branch,
    FeedForwardSpec,
    GatedMlpSpec,
    GdnSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    SoftmaxRouterSpec,
)
from hybrid_runtime.models.weights import BlockWeights, FeedForwardWeights, Linear, ModelWeights, MoeWeights


def adapt(model: PreTrainedModel) -> tuple[ModelSpec, ModelWeights]:
    """Spec and weights of a `Qwen3NextForCausalLM`, sharing its parameters."""
    config, backbone = model.config, model.model
    require_silu(config)
    require_layer_types(config, ("full_attention", "linear_attention"))
    blocks = [_block(config, layer, index, backbone.rotary_emb) for index, layer in enumerate(backbone.layers)]
    return assemble(model, blocks, _norm(config))


def _norm(config: Any) -> NormSpec:
    return NormSpec(config.rms_norm_eps, offset=1.0)


def _block(config: Any, layer: Any, index: int, rotary_emb: Any) -> tuple[BlockSpec, BlockWeights]:
    mixer_spec, mixer_weights = (
        _attention(config, layer.self_attn, rotary_emb)
        if config.layer_types[index] == "full_attention"
        else _gdn(config, layer.linear_attn)
    )
    feed_forward_spec, feed_forward_weights = (_moe if _is_sparse(config, index) else _dense)(config, layer.mlp)
    spec = BlockSpec((Branch(mixer_spec),), _norm(config), feed_forward_spec, _norm(config))
    weights = BlockWeights(
        branch_norm_D=layer.input_layernorm.weight,
        mixers=(mixer_weights,),
        feed_forward_norm_D=layer.post_attention_layernorm.weight,
        feed_forward=feed_forward_weights,
    )
    return spec, weights


def _is_sparse(config: Any, index: int) -> bool:
    if index in config.mlp_only_layers or not config.num_experts:
        return False
    return (index + 1) % config.decoder_sparse_step == 0


def _attention(config: Any, attention: Any, rotary_emb: Any) -> tuple[AttentionSpec, AttentionWeights]:
    rope, inv_freq_F = rope_of(config, rotary_emb)
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        value_dim=attention.head_dim,
        scale=float(attention.scaling),
        rope=rope,
        qk_norm=_norm(config),
        output_gate=True,
    )
    weights = AttentionWeights(
        query=Linear.of(attention.q_proj),
        key=Linear.of(attention.k_proj),
        value=Linear.of(attention.v_proj),
        output=Linear.of(attention.o_proj),
        query_norm_K=attention.q_norm.weight,
        key_norm_K=attention.k_norm.weight,
        inv_freq_F=inv_freq_F,
    )
    return spec, weights


def _gdn(config: Any, attention: Any) -> tuple[GdnSpec, GdnWeights]:
    spec = GdnSpec(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
    )
    weights = GdnWeights(
        qkvz=Linear.of(attention.in_proj_qkvz),
        ba=Linear.of(attention.in_proj_ba),
        conv=ShortConv.of(attention.conv1d),
        decay_bias_H=attention.dt_bias,
        log_decay_rate_H=attention.A_log,
        norm_V=attention.norm.weight,
        output=Linear.of(attention.out_proj),
    )
    return spec, weights


def _dense(config: Any, mlp: Any) -> tuple[FeedForwardSpec, FeedForwardWeights]:
    return GatedMlpSpec(config.intermediate_size), gated_mlp_weights(mlp)


def _moe(config: Any, mlp: Any) -> tuple[FeedForwardSpec, FeedForwardWeights]:
    spec = MoeSpec(
        num_experts=config.num_experts,
        intermediate_size=config.moe_intermediate_size,
        router=SoftmaxRouterSpec(
            config.num_experts_per_tok, softmax_before_top_k=True, renormalize=config.norm_topk_prob
        ),
        shared_expert=GatedMlpSpec(config.shared_expert_intermediate_size),
        shared_gate=True,
    )
    weights = MoeWeights(
        router=Linear(mlp.gate.weight),
        gate_up_EFD=mlp.experts.gate_up_proj,
        down_EDF=mlp.experts.down_proj,
        shared_expert=gated_mlp_weights(mlp.shared_expert),
        shared_gate=Linear.of(mlp.shared_expert_gate),
    )
    return spec, weights

"""Kimi Linear (moonshotai/Kimi-Linear-48B-A3B): KDA layers with MLA layers between them, no positions at all."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.models.adapters.common import assemble, gated_mlp_weights, require_layer_types, require_silu
from hybrid_runtime.models.mixers.kda import KdaWeights
from hybrid_runtime.models.mixers.mla import MlaWeights
from hybrid_runtime.models.mixers.short_conv import ShortConv
from hybrid_runtime.models.spec import (
    BlockSpec,
    Branch,
    FeedForwardSpec,
    GatedMlpSpec,
    KdaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    SigmoidGroupRouterSpec,
)
from hybrid_runtime.models.weights import BlockWeights, FeedForwardWeights, Linear, ModelWeights, MoeWeights


def adapt(model: PreTrainedModel) -> tuple[ModelSpec, ModelWeights]:
    """Spec and weights of a `KimiLinearForCausalLM`, sharing its parameters."""
    config = model.config
    require_silu(config)
    require_layer_types(config, ("full_attention", "linear_attention"))
    blocks = [_block(config, layer, index) for index, layer in enumerate(model.model.layers)]
    return assemble(model, blocks, NormSpec(config.rms_norm_eps))


def _block(config: Any, layer: Any, index: int) -> tuple[BlockSpec, BlockWeights]:
    is_attention = config.layer_types[index] == "full_attention"
    mixer_spec, mixer_weights = (_mla if is_attention else _kda)(config, layer.self_attn)
    is_sparse = config.mlp_layer_types[index] == "sparse"
    feed_forward_spec, feed_forward_weights = (_moe if is_sparse else _dense)(config, layer.mlp)
    norm = NormSpec(config.rms_norm_eps)
    spec = BlockSpec((Branch(mixer_spec),), norm, feed_forward_spec, norm)
    weights = BlockWeights(
        branch_norm_D=layer.input_layernorm.weight,
        mixers=(mixer_weights,),
        feed_forward_norm_D=layer.post_attention_layernorm.weight,
        feed_forward=feed_forward_weights,
    )
    return spec, weights


def _kda(config: Any, attention: Any) -> tuple[KdaSpec, KdaWeights]:
    head_dim, num_heads = config.linear_head_dim, config.linear_num_heads
    spec = KdaSpec(
        num_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
    )
    forget = attention.forget_gate
    weights = KdaWeights(
        query=Linear.of(attention.q_proj),
        key=Linear.of(attention.k_proj),
        value=Linear.of(attention.v_proj),
        conv=ShortConv.of(attention.conv1d),
        decay=(Linear.of(forget.f_a_proj), Linear.of(forget.f_b_proj)),
        dt_bias_HK=forget.dt_bias.view(num_heads, head_dim),
        log_decay_rate_H=forget.A_log.view(num_heads),
        beta=Linear.of(attention.b_proj),
        gate=(Linear.of(attention.g_a_proj), Linear.of(attention.g_b_proj)),
        norm_V=attention.o_norm.weight,
        output=Linear.of(attention.o_proj),
    )
    return spec, weights


def _mla(config: Any, attention: Any) -> tuple[MlaSpec, MlaWeights]:
    """The key channels named "rope" carry no rotation in this architecture; they are just shared by all heads."""
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModelError(
            f"{config.model_type}: num_key_value_heads={config.num_key_value_heads} is not supported (latent attention "
            f"has as many as num_attention_heads={config.num_attention_heads})"
        )
    low_rank = config.q_lora_rank is not None
    spec = MlaSpec(
        num_heads=config.num_attention_heads,
        latent_dim=config.kv_lora_rank,
        key_dim=config.qk_nope_head_dim,
        shared_key_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        scale=attention.scaling,
        latent_norm=NormSpec(attention.kv_a_layernorm.variance_epsilon),
        query_norm=NormSpec(attention.q_a_layernorm.variance_epsilon) if low_rank else None,
    )
    query = (attention.q_a_proj, attention.q_b_proj) if low_rank else (attention.q_proj,)
    weights = MlaWeights(
        query=tuple(Linear.of(module) for module in query),
        query_norm=attention.q_a_layernorm.weight if low_rank else None,
        latent=Linear.of(attention.kv_a_proj_with_mqa),
        latent_norm_R=attention.kv_a_layernorm.weight,
        expand=attention.kv_b_proj.weight,
        output=Linear.of(attention.o_proj),
    )
    return spec, weights


def _dense(config: Any, mlp: Any) -> tuple[FeedForwardSpec, FeedForwardWeights]:
    return GatedMlpSpec(config.intermediate_size), gated_mlp_weights(mlp)


def _moe(config: Any, mlp: Any) -> tuple[FeedForwardSpec, FeedForwardWeights]:
    spec = MoeSpec(
        num_experts=config.num_local_experts,
        intermediate_size=config.moe_intermediate_size,
        router=SigmoidGroupRouterSpec(
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_k_groups=config.topk_group,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        ),
        shared_expert=GatedMlpSpec(config.moe_intermediate_size * config.n_shared_experts),
    )
    weights = MoeWeights(
        router=Linear(mlp.gate.weight),
        gate_up_EFD=mlp.experts.gate_up_proj,
        down_EDF=mlp.experts.down_proj,
        correction_bias_E=mlp.gate.e_score_correction_bias,
        shared_expert=gated_mlp_weights(mlp.shared_experts),
    )
    return spec, weights

"""Granite 4.0 H (ibm-granite/granite-4.0-h-*): Mamba-2 layers with attention between them, dense or with experts."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hybrid_runtime.models.adapters.common import assemble, require, require_layer_types, require_silu, rope_of
from hybrid_runtime.models.mixers.attention import AttentionWeights
from hybrid_runtime.models.mixers.mamba2 import Mamba2Weights
from hybrid_runtime.models.mixers.short_conv import ShortConv
from hybrid_runtime.models.spec import (
    AttentionSpec,
    BlockSpec,
    Branch,
    FeedForwardSpec,
    GatedMlpSpec,
    Mamba2Spec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    SoftmaxRouterSpec,
)
from hybrid_runtime.models.weights import (
    BlockWeights,
    FeedForwardWeights,
    GatedMlpWeights,
    Linear,
    ModelWeights,
    MoeWeights,
)


def adapt(model: PreTrainedModel) -> tuple[ModelSpec, ModelWeights]:
    """Spec and weights of a `GraniteMoeHybridForCausalLM`, sharing its parameters."""
    config, backbone = model.config, model.model
    require_silu(config)
    require(config, "position_embedding_type", (None, "nope", "rope"))
    require_layer_types(config, ("full_attention", "linear_attention"))
    blocks = [_block(config, layer, backbone.rotary_emb) for layer in backbone.layers]
    return assemble(
        model,
        blocks,
        NormSpec(config.rms_norm_eps),
        embedding_multiplier=config.embedding_multiplier,
        logits_multiplier=1.0 / config.logits_scaling,
    )


def _block(config: Any, layer: Any, rotary_emb: Any) -> tuple[BlockSpec, BlockWeights]:
    mixer_spec, mixer_weights = (
        _attention(config, layer.self_attn, rotary_emb) if layer.mamba is None else _mamba2(config, layer.mamba)
    )
    feed_forward_spec, feed_forward_weights = _feed_forward(config, layer)
    norm = NormSpec(config.rms_norm_eps)
    spec = BlockSpec(
        (Branch(mixer_spec),), norm, feed_forward_spec, norm, residual_multiplier=float(config.residual_multiplier)
    )
    weights = BlockWeights(
        branch_norm_D=layer.input_layernorm.weight,
        mixers=(mixer_weights,),
        feed_forward_norm_D=layer.post_attention_layernorm.weight,
        feed_forward=feed_forward_weights,
    )
    return spec, weights


def _attention(config: Any, attention: Any, rotary_emb: Any) -> tuple[AttentionSpec, AttentionWeights]:
    rope, inv_freq_F = (None, None) if rotary_emb is None else rope_of(config, rotary_emb)
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        value_dim=attention.head_dim,
        scale=float(attention.scaling),
        rope=rope,
    )
    weights = AttentionWeights(
        query=Linear.of(attention.q_proj),
        key=Linear.of(attention.k_proj),
        value=Linear.of(attention.v_proj),
        output=Linear.of(attention.o_proj),
        inv_freq_F=inv_freq_F,
    )
    return spec, weights


def _mamba2(config: Any, mamba: Any) -> tuple[Mamba2Spec, Mamba2Weights]:
    min_time_step, max_time_step = config.time_step_limit
    spec = Mamba2Spec(
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_dim=config.mamba_d_state,
        conv_width=config.mamba_d_conv,
        norm_eps=config.rms_norm_eps,
        min_time_step=float(min_time_step),
        max_time_step=float(max_time_step),
    )
    weights = Mamba2Weights(
        input=Linear.of(mamba.in_proj),
        conv=ShortConv.of(mamba.conv1d),
        time_step_bias_H=mamba.dt_bias,
        log_decay_rate_H=mamba.A_log,
        skip_H=mamba.D,
        norm=mamba.norm.weight,
        output=Linear.of(mamba.out_proj),
    )
    return spec, weights


def _feed_forward(config: Any, layer: Any) -> tuple[FeedForwardSpec, FeedForwardWeights]:
    """The dense MLP of every layer is, where there are experts, their shared expert."""
    dense = GatedMlpSpec(config.shared_intermediate_size)
    mlp = layer.shared_mlp
    dense_weights = GatedMlpWeights((Linear.of(mlp.input_linear),), Linear.of(mlp.output_linear))
    if not config.num_local_experts:
        return dense, dense_weights
    spec = MoeSpec(
        num_experts=config.num_local_experts,
        intermediate_size=config.intermediate_size,
        router=SoftmaxRouterSpec(config.num_experts_per_tok, softmax_before_top_k=False, renormalize=True),
        shared_expert=dense,
    )
    moe = layer.block_sparse_moe
    weights = MoeWeights(
        router=Linear(moe.router.weight),
        gate_up_EFD=moe.experts.gate_up_proj,
        down_EDF=moe.experts.down_proj,
        shared_expert=dense_weights,
    )
    return spec, weights

"""Small random models of every supported architecture, in many shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

LINEAR, FULL = "linear_attention", "full_attention"
COMMON = {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


@dataclass(frozen=True, eq=False)
class Case:
    """A model by name.

    `reference_cache=False` where transformers cannot be trusted with a cache: its one-token Mamba-2 form leaves out the
    time step limits, and its cache needs an attention layer.
    """

    name: str
    config_class: type[PretrainedConfig]
    options: dict[str, Any]
    chunk_size: int = 64
    reference_cache: bool = True

    def __str__(self) -> str:
        return self.name

    def build(self) -> PreTrainedModel:
        """The model in float32; the same weights on every call."""
        config = self.config_class(**{**COMMON, **self.options})
        torch.manual_seed(sum(map(ord, self.name)))
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        randomize(model)
        return model


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draws every weight anew, so that each one matters and the most likely token varies from step to step.

    Matrices come from N(0, 0.7 / sqrt(fan in)); decay rates and time steps from the ranges that trained models have.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        if "inv_freq" in leaf:
            continue
        if leaf == "A_log":
            tensor.uniform_(1.0, 16.0).log_()
        elif leaf == "dt_bias":
            tensor.uniform_(0.001, 0.1).expm1_().log_()  # inverse softplus of the time step
        elif tensor.squeeze().dim() >= 2:
            fan_in = tensor.shape[-1] if tensor.shape[-2] != 1 else tensor[0].numel()
            tensor.normal_(0.0, 0.7 * fan_in**-0.5)
        elif (leaf == "weight" and tensor.dim() == 1) or leaf == "D":
            tensor.add_(torch.randn_like(tensor), alpha=0.2)  # norms keep their centre, be it one or zero
        else:
            tensor.normal_(0.0, 0.2)


def _kimi(name: str, *, chunk_size: int = 64, reference_cache: bool = True, **options: Any) -> Case:
    defaults = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 56,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 4,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    }
    return Case(name, KimiLinearConfig, {**defaults, **options}, chunk_size, reference_cache)


def _granite(name: str, *, chunk_size: int = 64, reference_cache: bool = True, **options: Any) -> Case:
    defaults = {
        "vocab_size": 151,
        "hidden_size": 48,
        "intermediate_size": 20,
        "shared_intermediate_size": 36,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 12,
        "mamba_chunk_size": 32,
        "embedding_multiplier": 5.0,
        "logits_scaling": 0.6,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    }
    return Case(name, GraniteMoeHybridConfig, {**defaults, **options}, chunk_size, reference_cache)


def _qwen(name: str, *, chunk_size: int = 64, **options: Any) -> Case:
    defaults = {
        "vocab_size": 190,
        "hidden_size": 40,
        "intermediate_size": 52,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 10,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    }
    return Case(name, Qwen3NextConfig, {**defaults, **options}, chunk_size)


CASES = (
    _kimi("kimi"),
    _kimi(
        "kimi-low-rank-query",
        chunk_size=24,
        q_lora_rank=12,
        num_attention_heads=5,
        num_key_value_heads=5,
        attention_bias=True,
        linear_num_heads=5,
        linear_conv_kernel_dim=3,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        n_shared_experts=2,
    ),
    _kimi(
        "kimi-dense-kda-only",
        reference_cache=False,
        num_hidden_layers=3,
        layer_types=[LINEAR] * 3,
        mlp_layer_types=["dense"] * 3,
    ),
    _granite("granite-nope"),
    _granite(
        "granite-moe-rope",
        chunk_size=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        position_embedding_type="rope",
        mamba_n_groups=3,
        mamba_d_conv=3,
        tie_word_embeddings=True,
        embedding_multiplier=0.4,  # a larger share of the embedding would make every token its own successor
    ),
    _granite(
        "granite-biases-limits",
        reference_cache=False,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_n_heads=3,
        mamba_d_head=32,
        time_step_limit=(0.01, 0.06),
        position_embedding_type="rope",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    _granite("granite-attention-only", layer_types=[FULL] * 2, num_hidden_layers=2, position_embedding_type="rope"),
    _qwen("qwen"),
    _qwen(
        "qwen-sparse-steps",
        chunk_size=24,
        num_hidden_layers=5,
        layer_types=[LINEAR, FULL, LINEAR, FULL, LINEAR],
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
        attention_bias=True,
        linear_conv_kernel_dim=3,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
)

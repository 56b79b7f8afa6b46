"""A model of each architecture, with layers of the sizes that its published checkpoints have, and as few as will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel

_LINEAR, _FULL = "linear_attention", "full_attention"
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def _granite(**sizes: Any) -> PretrainedConfig:
    options = {
        "vocab_size": 100352,
        "hidden_size": 1536,
        "shared_intermediate_size": 4096,
        "num_hidden_layers": 2,
        "layer_types": [_LINEAR, _FULL],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    }
    return GraniteMoeHybridConfig(**{**_TOKENS, **options, **sizes})


def _kimi(**sizes: Any) -> PretrainedConfig:
    options = {
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 3,
        "layer_types": [_LINEAR, _LINEAR, _FULL],
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
    }
    return KimiLinearConfig(**{**_TOKENS, **options, **sizes})


def _qwen(**sizes: Any) -> PretrainedConfig:
    options = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 2,
        "layer_types": [_LINEAR, _FULL],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    }
    return Qwen3NextConfig(**{**_TOKENS, **options, **sizes})


_CONFIGS: Mapping[str, Callable[..., PretrainedConfig]] = {
    "granitemoehybrid": _granite,
    "kimi_linear": _kimi,
    "qwen3_next": _qwen,
}

_SMALL: Mapping[str, Mapping[str, Any]] = {
    "granitemoehybrid": {
        "vocab_size": 64,
        "hidden_size": 32,
        "shared_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "kimi_linear": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
    },
    "qwen3_next": {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}

ARCHITECTURES = tuple(_CONFIGS)
"""Names of the models that the report knows."""


def build_model(
    architecture: str, device: torch.device | str, dtype: torch.dtype, *, small: bool = False
) -> HybridModel:
    """A model with random weights; under a `FakeTensorMode`, with fake ones, at no cost in memory.

    It has one layer of each kind, at the sizes of a published checkpoint or, if `small`, at sizes of some tens.
    """
    config = _CONFIGS[architecture](**(_SMALL[architecture] if small else {}))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    return adapt(model)

"""The architecture of the bundled checkpoint and its initial weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from hybrid_runtime.training.tokenizer import END_OF_TEXT_ID, PAD_ID


@dataclass(frozen=True)
class Size:
    """What a command line may change about the architecture."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 6
    vocab_size: int = 4096


def tiny_config(size: Size) -> KimiLinearConfig:
    """Six layers, KDA with multi-head latent attention as the third and the sixth, all feed-forward blocks dense."""
    layer_types = ["linear_attention", "linear_attention", "full_attention"] * 2
    return KimiLinearConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=["dense"] * len(layer_types),
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        kv_lora_rank=64,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=size.num_heads,
        max_position_embeddings=65536,
        pad_token_id=PAD_ID,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        dtype="float32",
    )


def initial_model(size: Size, seed: int) -> KimiLinearForCausalLM:
    """A float32 model with fresh weights, the same for the same seed.

    Matrices start at the scale that keeps variances (1 / sqrt(fan in)), those that write into the residual stream
    smaller by sqrt(2 * layers). The output head starts small, so that the first predictions are near uniform,
    and so does the last projection of the forget gate, so that decays start where `dt_bias` and `A_log` put them.
    """
    torch.manual_seed(seed)
    model = KimiLinearForCausalLM(tiny_config(size)).float()
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 * model.config.num_hidden_layers
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=0.1, generator=generator)
            elif isinstance(module, nn.Conv1d):
                module.weight.uniform_(-0.5, 0.5, generator=generator)
            elif isinstance(module, nn.Linear):
                std = 1 / math.sqrt(module.in_features)
                if name.endswith(("o_proj", "down_proj")):
                    std /= math.sqrt(num_blocks)
                elif name.endswith(("lm_head", "f_b_proj")):
                    std = 0.01
                module.weight.normal_(std=std, generator=generator)
    return model

"""What the adapters share: refusing options, and reading the parts that every transformers model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.models.spec import BlockSpec, ModelSpec, NormSpec, RopeSpec
from hybrid_runtime.models.weights import BlockWeights, GatedMlpWeights, Linear, ModelWeights

# Their frequencies depend on the length of the text, so one table of frequencies does not describe them.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def require(config: Any, option: str, supported: Sequence[object]) -> None:
    """Raises UnsupportedModelError, naming the option and its value, unless the value is one of those supported."""
    value = getattr(config, option)
    if value not in supported:
        names = ", ".join(repr(item) for item in supported)
        raise UnsupportedModelError(f"{config.model_type}: {option}={value!r} is not supported (supported: {names})")


def require_silu(config: Any) -> None:
    """Raises UnsupportedModelError unless the config's activation is SiLU, by either of its names."""
    require(config, "hidden_act", ("silu", "swish"))


def require_layer_types(config: Any, supported: Sequence[str]) -> None:
    """Raises UnsupportedModelError for the first layer whose type is not one of those supported."""
    for index, layer_type in enumerate(config.layer_types):
        if layer_type not in supported:
            raise UnsupportedModelError(
                f"{config.model_type}: layer_types[{index}]={layer_type!r} is not supported "
                f"(supported: {', '.join(map(repr, supported))})"
            )


def rope_of(config: Any, rotary_emb: Any) -> tuple[RopeSpec, torch.Tensor]:
    """Spec and frequencies of a transformers rotary module, whose buffer already holds any scaling."""
    if rotary_emb.rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            f"{config.model_type}: rope_type={rotary_emb.rope_type!r} is not supported: its frequencies depend on the "
            "length of the text"
        )
    spec = RopeSpec(2 * rotary_emb.inv_freq.numel(), float(rotary_emb.attention_scaling))
    return spec, rotary_emb.inv_freq


def gated_mlp_weights(mlp: Any) -> GatedMlpWeights:
    """Weights of an MLP with separate `gate_proj` and `up_proj`."""
    return GatedMlpWeights((Linear.of(mlp.gate_proj), Linear.of(mlp.up_proj)), Linear.of(mlp.down_proj))


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end a text: those of the generation config, else those of the model's.

    An id outside the vocabulary can never be chosen and is left out.
    """
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = model.config.eos_token_id if generation is None else generation
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    several = ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    return tuple(int(token_id) for token_id in several if 0 <= int(token_id) < model.config.vocab_size)


def assemble(
    model: PreTrainedModel,
    blocks: Sequence[tuple[BlockSpec, BlockWeights]],
    final_norm: NormSpec,
    *,
    embedding_multiplier: float = 1.0,
    logits_multiplier: float = 1.0,
) -> tuple[ModelSpec, ModelWeights]:
    """Spec and weights of a causal language model with the usual `model.embed_tokens`, `model.norm` and `lm_head`."""
    config, backbone = model.config, model.model
    spec = ModelSpec(
        name=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=eos_token_ids(model),
        blocks=tuple(block_spec for block_spec, _ in blocks),
        final_norm=final_norm,
        embedding_multiplier=float(embedding_multiplier),
        logits_multiplier=float(logits_multiplier),
    )
    weights = ModelWeights(
        embedding_VD=backbone.embed_tokens.weight,
        blocks={spec.weights_key(depth): block_weights for depth, (_, block_weights) in enumerate(blocks)},
        final_norm_D=backbone.norm.weight,
        lm_head=Linear.of(model.lm_head),
    )
    return spec, weights

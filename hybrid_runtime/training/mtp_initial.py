"""Weights that a head's training starts from: the target's own attention and feed-forward layers.

Shapes: D hidden size, H heads, R latent dim, E shared key channels, K expanded key channels, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers.mla import MlaMixer
from hybrid_runtime.models.mtp_weights import MtpSpec, attention_mixers, tensor_shapes
from hybrid_runtime.models.weights import BlockWeights, GatedMlpWeights

NORM_EPS = 1e-5


def initial_spec(target: HybridModel, kv_layers: Sequence[int] | None = None) -> MtpSpec:
    """A head whose blocks read the named attention layers of the target (default: the last one alone), each as wide as
    the target's own blocks.

    Raises ValueError for a target whose attention is not latent, or whose feed-forward layers are not dense.
    """
    blocks = _attention_blocks(target)
    mixers = [mixer for mixer in attention_mixers(target) if isinstance(mixer, MlaMixer)]
    if not mixers or len(mixers) != len(attention_mixers(target)):
        raise ValueError(f"{target.spec.name}: heads are trained for targets with latent attention only")
    inner = {_dense(block).down.weight_OI.shape[1] for block in blocks}
    num_heads = {mixer.spec.num_heads for mixer in mixers}
    layers = (len(mixers) - 1,) if kv_layers is None else tuple(kv_layers)
    return MtpSpec(target.spec.hidden_size, max(num_heads), max(inner), layers, NORM_EPS)


@torch.no_grad()
def initial_tensors(spec: MtpSpec, target: HybridModel, seed: int) -> dict[str, Tensor]:
    """Float32 weights under the names of `tensor_shapes`; the same for the same seed.

    Each block starts as the target's block whose KV it reads, with queries and outputs absorbed into the latent space;
    the parent's hidden state passes through at its usual size, the embedding enters at random.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = spec.hidden_size
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in tensor_shapes(spec, target).items()
    }
    tensors["project"][:, hidden:] = torch.eye(hidden)
    tensors["final_norm"] = target.weights.final_norm_D.float().clone()
    mixers, blocks = attention_mixers(target), _attention_blocks(target)
    for index, layer in enumerate(spec.kv_layers):
        mixer = mixers[layer]
        assert isinstance(mixer, MlaMixer)
        prefix = f"blocks.{index}."
        own = _absorbed(mixer) | _feed_forward(blocks[layer])
        tensors |= {prefix + name: value for name, value in own.items() if value.shape == tensors[prefix + name].shape}
    return tensors


def _attention_blocks(target: HybridModel) -> list[BlockWeights]:
    """The weights of the blocks that hold the target's attentions, in their order."""
    return [
        target.weights.blocks[target.spec.weights_key(depth)]
        for depth, block in enumerate(target.blocks)
        for mixer in block.mixers
        if isinstance(mixer, MlaMixer)
    ]


def _dense(block: BlockWeights) -> GatedMlpWeights:
    if not isinstance(block.feed_forward, GatedMlpWeights):
        raise ValueError("heads are trained for targets with dense feed-forward layers only")
    return block.feed_forward


def _absorbed(mixer: MlaMixer) -> dict[str, Tensor]:
    """`q · (w_k latent)` as `(w_kᵀ q) · latent`, and the output map over latents instead of values."""
    spec, weights = mixer.spec, mixer.weights
    expand_HXR = weights.expand.float().unflatten(0, (spec.num_heads, -1))
    w_k_HKR, w_v_HVR = expand_HXR.split([spec.key_dim, spec.value_dim], dim=1)
    query_HCD = weights.query[-1].weight_OI.float().unflatten(0, (spec.num_heads, -1))
    q_HKD, shared_HED = query_HCD.split([spec.key_dim, spec.shared_key_dim], dim=1)
    query_HCD = torch.cat([einsum(w_k_HKR, q_HKD, "h k r, h k d -> h r d"), shared_HED], dim=1)
    output_DHV = weights.output.weight_OI.float().unflatten(1, (spec.num_heads, -1))
    output_DHR = einsum(output_DHV, w_v_HVR, "d h v, h v r -> d h r")
    return {
        "query": rearrange(query_HCD, "h c d -> (h c) d"),
        "output": rearrange(output_DHR, "d h r -> d (h r)"),
    }


def _feed_forward(block: BlockWeights) -> dict[str, Tensor]:
    mlp = _dense(block)
    assert block.branch_norm_D is not None
    assert block.feed_forward_norm_D is not None
    return {
        "attention_norm": block.branch_norm_D.float().clone(),
        "feed_forward_norm": block.feed_forward_norm_D.float().clone(),
        "gate_up": torch.cat([part.weight_OI.float() for part in mlp.gate_up]),
        "down": mlp.down.weight_OI.float().clone(),
    }

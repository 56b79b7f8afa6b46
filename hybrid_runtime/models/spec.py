"""What a model is, as data: no tensors, no behaviour.

A mixer kind is one dataclass here and one file in `mixers/`. Weights come beside the spec (`weights.py`); blocks are
combined with residuals, multipliers, parallel branches and shared weights without knowing which kinds they hold.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NormSpec:
    """RMS norm; the weight is applied as `offset + weight` (1.0 for weights that are stored around zero)."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions on the first `rotary_dim` channels of a head, half against half. Frequencies are weights."""

    rotary_dim: int
    attention_scaling: float = 1.0


class MixerSpec:
    """Base of all mixer specs; `mixers.build_mixer` finds the class that executes one."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Grouped-query attention (MHA and MQA included). `rope=None` is NoPE; `window` counts the token itself."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None = None
    qk_norm: NormSpec | None = None
    output_gate: bool = False  # the query projection also yields, behind each head's query, a sigmoid gate
    window: int | None = None


@dataclass(frozen=True)
class MlaSpec(MixerSpec):
    """Multi-head latent attention without rotary positions; the KV pool holds one latent per token.

    A head's key is `key_dim` channels expanded from the latent, then `shared_key_dim` channels that all heads share.
    `query_norm` is None where queries are projected directly, without a low-rank bottleneck.
    """

    num_heads: int
    latent_dim: int
    key_dim: int
    shared_key_dim: int
    value_dim: int
    scale: float
    latent_norm: NormSpec
    query_norm: NormSpec | None = None


@dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """Mamba-2: short convolution over (x, B, C), scalar decay per head, norm of the gated output per group."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    norm_eps: float
    min_time_step: float = 0.0
    max_time_step: float = float("inf")


@dataclass(frozen=True)
class GdnSpec(MixerSpec):
    """Gated DeltaNet: short convolution over (q, k, v), scalar decay per value head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float


@dataclass(frozen=True)
class KdaSpec(MixerSpec):
    """Kimi delta attention: short convolution over (q, k, v), decay per key channel."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float


@dataclass(frozen=True)
class GatedMlpSpec:
    """`down(silu(gate(x)) * up(x))`."""

    intermediate_size: int


@dataclass(frozen=True)
class SoftmaxRouterSpec:
    """The best `top_k` experts, weighted by a softmax over all experts, or over the chosen ones alone.

    `renormalize` makes the weights of a softmax over all experts sum to one.
    """

    top_k: int
    softmax_before_top_k: bool
    renormalize: bool


@dataclass(frozen=True)
class SigmoidGroupRouterSpec:
    """Sigmoid scores plus a correction bias; the best `top_k` experts of the best `top_k_groups` groups (DeepSeek-V3).

    The correction bias takes part in the choice only, never in the weights.
    """

    top_k: int
    num_groups: int
    top_k_groups: int
    renormalize: bool
    scale: float


RouterSpec = SoftmaxRouterSpec | SigmoidGroupRouterSpec


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts, plus a shared expert (`shared_gate`: times a sigmoid gate) that sees every token."""

    num_experts: int
    intermediate_size: int
    router: RouterSpec
    shared_expert: GatedMlpSpec | None = None
    shared_gate: bool = False


FeedForwardSpec = GatedMlpSpec | MoeSpec


@dataclass(frozen=True)
class Branch:
    """One mixer of a block, between two multipliers."""

    mixer: MixerSpec
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0


@dataclass(frozen=True)
class BlockSpec:
    """One depth of the model: its branches run in parallel on the same normed input and are summed.

    A block may have no branches (feed-forward only) or no feed-forward. Depths with the same `shared_weights` key use
    one set of weights, and each its own KV and state.
    """

    branches: tuple[Branch, ...]
    branch_norm: NormSpec | None
    feed_forward: FeedForwardSpec | None = None
    feed_forward_norm: NormSpec | None = None
    residual_multiplier: float = 1.0
    shared_weights: str | None = None

    def __post_init__(self) -> None:
        if bool(self.branches) != (self.branch_norm is not None):
            raise ValueError("branch_norm goes with branches: give both or neither")
        if (self.feed_forward is None) != (self.feed_forward_norm is None):
            raise ValueError("feed_forward_norm goes with feed_forward: give both or neither")


@dataclass(frozen=True)
class ModelSpec:
    """A whole language model. `blocks` are the depths, first to last; `logits = logits_multiplier * lm_head(...)`."""

    name: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0

    def weights_key(self, depth: int) -> str:
        """Key under which the weights of the block at `depth` are found."""
        return self.blocks[depth].shared_weights or f"block.{depth}"

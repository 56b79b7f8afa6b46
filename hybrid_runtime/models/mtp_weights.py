"""What a multi-token-prediction head is, as data: its sizes, its weights by name, and which target it fits.

Shapes: D hidden size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hybrid_runtime.models.frozen_attention import FrozenAttentionWeights, frozen_dims
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import AttentionMixer
from hybrid_runtime.models.mixers.attention import GqaMixer
from hybrid_runtime.models.weights import GatedMlpWeights, Linear


@dataclass(frozen=True)
class MtpSpec:
    """Sizes of a head. `kv_layers`: for each block, whose KV it reads, as an index into `StepMemory.kv_layers`.

    Raises ValueError for sizes that are not positive, and for a head without blocks.
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    kv_layers: tuple[int, ...]
    norm_eps: float

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "intermediate_size", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if not self.kv_layers:
            raise ValueError("kv_layers is empty: a head needs a block")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MtpSpec:
        """The spec that `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "kv_layers": tuple(map(int, fields["kv_layers"]))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not the spec of a head: {text!r}: {error}") from error


@dataclass(frozen=True)
class MtpBlockWeights:
    """Of one block: attention over frozen KV, then a gated MLP, each behind a norm."""

    attention_norm_D: Tensor
    attention: FrozenAttentionWeights
    feed_forward_norm_D: Tensor
    feed_forward: GatedMlpWeights

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> MtpBlockWeights:
        """The block whose tensors have names that begin with `prefix`; shares them."""
        return cls(
            attention_norm_D=tensors[prefix + "attention_norm"],
            attention=FrozenAttentionWeights(Linear(tensors[prefix + "query"]), Linear(tensors[prefix + "output"])),
            feed_forward_norm_D=tensors[prefix + "feed_forward_norm"],
            feed_forward=GatedMlpWeights((Linear(tensors[prefix + "gate_up"]),), Linear(tensors[prefix + "down"])),
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors that `of` was given, by their names without the prefix."""
        return {
            "attention_norm": self.attention_norm_D,
            "query": self.attention.query.weight_OI,
            "output": self.attention.output.weight_OI,
            "feed_forward_norm": self.feed_forward_norm_D,
            "gate_up": self.feed_forward.gate_up[0].weight_OI,
            "down": self.feed_forward.down.weight_OI,
        }


@dataclass(frozen=True)
class MtpWeights:
    """`project` `[D, 2 D]` reads the normed embedding, then the normed hidden state of the parent."""

    embedding_norm_D: Tensor
    hidden_norm_D: Tensor
    project: Linear
    blocks: tuple[MtpBlockWeights, ...]
    final_norm_D: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], num_blocks: int) -> MtpWeights:
        """The weights that `tensor_shapes` names; shares the tensors."""
        return cls(
            embedding_norm_D=tensors["embedding_norm"],
            hidden_norm_D=tensors["hidden_norm"],
            project=Linear(tensors["project"]),
            blocks=tuple(MtpBlockWeights.of(tensors, f"blocks.{index}.") for index in range(num_blocks)),
            final_norm_D=tensors["final_norm"],
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors that `of` was given."""
        tensors = {
            "embedding_norm": self.embedding_norm_D,
            "hidden_norm": self.hidden_norm_D,
            "project": self.project.weight_OI,
            "final_norm": self.final_norm_D,
        }
        for index, block in enumerate(self.blocks):
            tensors |= {f"blocks.{index}.{name}": tensor for name, tensor in block.named_tensors().items()}
        return tensors


def attention_mixers(target: HybridModel) -> tuple[AttentionMixer, ...]:
    """The attentions of a model, in the order of `StepMemory.kv_layers`."""
    return tuple(mixer for block in target.blocks for mixer in block.mixers if isinstance(mixer, AttentionMixer))


def tensor_shapes(spec: MtpSpec, target: HybridModel) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a head for `target`.

    Raises ValueError, which says what does not fit, if no head of this spec can draft for `target`.
    """
    mixers = _required_mixers(spec, target)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding_norm": (hidden,),
        "hidden_norm": (hidden,),
        "project": (hidden, 2 * hidden),
        "final_norm": (hidden,),
    }
    for index, mixer in enumerate(mixers):
        query_dim, output_dim = frozen_dims(mixer)
        block = {
            "attention_norm": (hidden,),
            "query": (spec.num_heads * query_dim, hidden),
            "output": (hidden, spec.num_heads * output_dim),
            "feed_forward_norm": (hidden,),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def _required_mixers(spec: MtpSpec, target: HybridModel) -> list[AttentionMixer]:
    """The attention that each block reads; ValueError if one is missing or does not fit."""
    name, mixers = target.spec.name, attention_mixers(target)
    if not mixers:
        raise ValueError(f"{name} has no attention layer whose KV a head could read")
    if spec.hidden_size != target.spec.hidden_size:
        raise ValueError(f"hidden_size is {spec.hidden_size}, but {target.spec.hidden_size} in {name}")
    for layer in spec.kv_layers:
        if not 0 <= layer < len(mixers):
            raise ValueError(f"kv_layers names {layer}, but the attention layers of {name} are 0 to {len(mixers) - 1}")
        mixer = mixers[layer]
        if isinstance(mixer, GqaMixer) and spec.num_heads % mixer.spec.num_kv_heads:
            raise ValueError(
                f"num_heads is {spec.num_heads}, no multiple of the {mixer.spec.num_kv_heads} KV heads of "
                f"attention layer {layer} of {name}"
            )
    return [mixers[layer] for layer in spec.kv_layers]

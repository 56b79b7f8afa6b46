"""Weights as plain tensors, usually the very parameters of a transformers model.

Shapes: O outputs, I inputs, E experts, D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class Linear(NamedTuple):
    """An affine map, `kernels.linear(x, *map)`; shares the tensors it was made from."""

    weight_OI: Tensor
    bias_O: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Linear) -> Linear:
        """The map of a torch module, sharing its parameters."""
        return cls(module.weight, module.bias)


@dataclass(frozen=True)
class GatedMlpWeights:
    """`gate_up` is one map that yields gate then up, or the two maps."""

    gate_up: tuple[Linear, ...]
    down: Linear


@dataclass(frozen=True)
class MoeWeights:
    """Experts as stacked tensors. `correction_bias_E` belongs to the sigmoid router alone."""

    router: Linear
    gate_up_EFD: Tensor  # F here: gate rows, then up rows
    down_EDF: Tensor
    correction_bias_E: Tensor | None = None
    shared_expert: GatedMlpWeights | None = None
    shared_gate: Linear | None = None


FeedForwardWeights = GatedMlpWeights | MoeWeights


@dataclass(frozen=True)
class BlockWeights:
    """Of one block: one entry of `mixers` per branch, of the class that the mixer's file names."""

    branch_norm_D: Tensor | None
    mixers: tuple[Any, ...]
    feed_forward_norm_D: Tensor | None = None
    feed_forward: FeedForwardWeights | None = None


@dataclass(frozen=True)
class ModelWeights:
    """Of a whole model; `blocks` by `ModelSpec.weights_key`."""

    embedding_VD: Tensor
    blocks: Mapping[str, BlockWeights]
    final_norm_D: Tensor
    lm_head: Linear

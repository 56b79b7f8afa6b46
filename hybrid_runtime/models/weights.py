"""Weights as plain tensors, usually the very parameters of a transformers model.

Shapes: O outputs, I inputs, E experts, D hidden size, F intermediate size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn

T = TypeVar("T")


class Linear(NamedTuple):
    """An affine map, `kernels.linear(x, *map)`; shares the tensors it was made from."""

    weight_OI: Tensor
    bias_O: Tensor | None = None
    packed: Tensor | None = None  # the weight once more, as `kernels.pack` lays it out

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


def map_linears(weights: T, change: Callable[[Linear], Linear]) -> T:
    """The same weights with every affine map in them, at any depth, replaced by `change` of it."""
    if isinstance(weights, Linear):
        return cast(T, change(weights))
    if dataclasses.is_dataclass(weights):
        fields = {
            field.name: map_linears(getattr(weights, field.name), change) for field in dataclasses.fields(weights)
        }
        return cast(T, dataclasses.replace(cast(Any, weights), **fields))
    if isinstance(weights, Mapping):
        return cast(T, {key: map_linears(value, change) for key, value in weights.items()})
    if type(weights) is tuple:
        return cast(T, tuple(map_linears(value, change) for value in cast(tuple[Any, ...], weights)))
    return weights

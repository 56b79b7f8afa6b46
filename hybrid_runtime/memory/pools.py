"""The device tensors that slots index: a KV pool over all attention layers, a state pool over all recurrent ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.ops.kernels import slot_copies


@dataclass(frozen=True)
class TensorSpec:
    """Shape of one slot of one named pool tensor, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


LayerSpec = Mapping[str, TensorSpec]


class Pool:
    """Tensors `[num_slots + 1, ...]`, one per layer and name; index 0 is the null slot.

    The pool owns memory, not slots: who may write a slot is the business of its allocator and of the slot's owner.
    """

    def __init__(self, layers: Sequence[LayerSpec], num_slots: int, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        with torch.inference_mode(False):  # else the pools of a runtime made in that mode would be read-only outside
            self.layers: tuple[dict[str, Tensor], ...] = tuple(
                {
                    name: torch.zeros(num_slots + 1, *spec.shape, dtype=spec.dtype, device=device)
                    for name, spec in layer.items()
                }
                for layer in layers
            )
        tensors = [tensor for layer in self.layers for tensor in layer.values()]
        self._copies = slot_copies(tensors, torch.device(device))

    def free(self) -> None:
        """Gives the memory back; nothing can be copied afterwards."""
        self.layers = ()
        self._copies = slot_copies((), torch.device("cpu"))

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies slot contents in every layer: `destinations[i]` gets what `sources[i]` holds. int64 `[n]` each.

        No slot may be both a source and a destination of one call.
        """
        self._copies.copy(sources, destinations)

    def clear(self, slots: Tensor) -> None:
        """Writes zeros to the given slots (int64 `[n]`) in every layer."""
        self._copies.clear(slots)

    def fill(self, slots: Tensor, value: float) -> None:
        """Writes `value` to the given slots (int64 `[n]`) in every layer; tests poison released slots with NaN."""
        for layer in self.layers:
            for tensor in layer.values():
                tensor[slots] = value


def bytes_per_slot(layers: Sequence[LayerSpec]) -> int:
    """Bytes that one slot takes over all layers."""
    return sum(spec.num_bytes for layer in layers for spec in layer.values())

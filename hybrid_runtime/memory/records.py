"""The tensors that verifies write instead of states, sized at start.

Shapes: R rows of the request table with the padding row, T nodes of a draft tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.memory.pools import LayerSpec, TensorSpec


@dataclass(frozen=True)
class RecordPlan:
    """Records of all recurrent layers for `num_rows` rows. Tensors named in `shared` are one for all layers of a shape.

    They hold nothing beyond one layer's verify.
    """

    layers: tuple[LayerSpec, ...]
    num_rows: int
    shared: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        return self.num_rows * sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self._tensors())

    def allocate(self, device: torch.device) -> tuple[dict[str, Tensor], ...]:
        """Per layer the tensors `[R, T, ...]` by name, of zeros."""
        shared: dict[tuple[str, TensorSpec], Tensor] = {}

        def tensor(name: str, spec: TensorSpec) -> Tensor:
            if name not in self.shared:
                return torch.zeros(self.num_rows, *spec.shape, dtype=spec.dtype, device=device)
            if (name, spec) not in shared:
                shared[name, spec] = torch.zeros(self.num_rows, *spec.shape, dtype=spec.dtype, device=device)
            return shared[name, spec]

        with torch.inference_mode(False):  # as the pools: writable in either mode
            return tuple({name: tensor(name, spec) for name, spec in layer.items()} for layer in self.layers)

    def _tensors(self) -> Iterable[TensorSpec]:
        named: Sequence[tuple[str, TensorSpec]] = [item for layer in self.layers for item in layer.items()]
        yield from (spec for name, spec in named if name not in self.shared)
        yield from (spec for _, spec in {(name, spec) for name, spec in named if name in self.shared})

"""What a mixer is to the model: named tensors per slot, and the forms of a prefill, a decode and a verify.

Shapes: L tokens, B rows, T nodes of a draft tree, N all nodes of B trees, S sequences, R requested states, D hidden
size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec


@dataclass(frozen=True)
class MixerMemory:
    """The pool tensors of one mixer at one depth, by name, and the request table. Mutated in place by a step.

    `records`: what a verify notes down for the commit, by name, `[rows + 1, T, ...]`; of a recurrent mixer only.
    """

    tensors: Mapping[str, Tensor]
    req_to_token: Tensor
    records: Mapping[str, Tensor] = field(default_factory=dict)


class Mixer(ABC):
    """Mixes tokens of a sequence. It owns no memory: the same mixer may serve several depths."""

    @abstractmethod
    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        """Output `[L, D]` of a ragged prefill; continues from, and writes, the pools. Padding tokens: any value."""

    @abstractmethod
    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        """Output `[B, D]` of one token per row; continues from, and writes, the pools."""


class AttentionMixer(Mixer):
    """A mixer whose memory is one entry per token, in the KV pool."""

    @abstractmethod
    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory) -> Tensor:
        """Output `[N, D]` of all nodes of all trees, row by row; writes the nodes' entries of the KV pool."""

    @abstractmethod
    def kv_tensors(self, dtype: torch.dtype) -> LayerSpec:
        """What one KV slot holds for this mixer, in the KV pool's dtype."""


def write_node_entries(pool: Tensor, slots_N: Tensor, values_N: Tensor) -> None:
    """As `write_slots`, for the nodes of draft trees. Those that only fill a tree up leave slot 0 zeros."""
    is_filler_N = (slots_N == 0).reshape(-1, *[1] * (values_N.dim() - 1))
    write_slots(pool, slots_N, values_N.masked_fill(is_filler_N, 0))


def write_slots(pool: Tensor, slots_N: Tensor, values_N: Tensor) -> None:
    """Writes one row per slot into a pool tensor, in its dtype.

    `index_put_` on the tensor itself, never on a view of it: a compiled step would copy the pool for a view.
    """
    pool.index_put_((slots_N,), values_N.to(pool.dtype))

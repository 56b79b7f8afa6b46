"""What a mixer is to the model: named tensors per slot, a prefill form and a decode form.

Shapes: L tokens, B rows, S sequences, R requested states, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs
from hybrid_runtime.memory.pools import LayerSpec


@dataclass(frozen=True)
class MixerMemory:
    """The pool tensors of one mixer at one depth, by name, and the request table. Mutated in place by a step."""

    tensors: Mapping[str, Tensor]
    req_to_token: Tensor


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
    def kv_tensors(self, dtype: torch.dtype) -> LayerSpec:
        """What one KV slot holds for this mixer, in the KV pool's dtype."""


class RecurrentMixer(Mixer):
    """A mixer whose memory is one state per sequence, in the state pool."""

    @abstractmethod
    def state_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype) -> LayerSpec:
        """What one state slot holds for this mixer: conv windows in the model's `dtype`, states in `state_dtype`."""


def write_slots(pool: Tensor, slots_N: Tensor, values_N: Tensor) -> None:
    """Writes one row per slot into a pool tensor, in its dtype.

    `index_put_` on the tensor itself, never on a view of it: a compiled step would copy the pool for a view.
    """
    pool.index_put_((slots_N,), values_N.to(pool.dtype))

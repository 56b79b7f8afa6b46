"""The short causal convolution in front of the recurrent mixers: pool windows in, activated channels out.

Shapes: L tokens, B rows, D channels, W conv width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs
from hybrid_runtime.memory.pools import TensorSpec
from hybrid_runtime.models.mixers.base import MixerMemory, write_slots
from hybrid_runtime.ops.kernels import Kernels

WINDOW = "conv"


class ShortConv(NamedTuple):
    """Depthwise causal convolution followed by SiLU; its last W − 1 inputs live in the state pool as `conv`."""

    weight_DW: Tensor
    bias_D: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Conv1d) -> ShortConv:
        """The convolution of a depthwise torch module, sharing its parameters."""
        return cls(module.weight.squeeze(1), module.bias)

    def window_spec(self, dtype: torch.dtype) -> TensorSpec:
        channels, width = self.weight_DW.shape
        return TensorSpec((width - 1, channels), dtype)

    def prefill(self, kernels: Kernels, x_LD: Tensor, inputs: PrefillInputs, memory: MixerMemory) -> Tensor:
        pool = memory.tensors[WINDOW]
        y_LD, windows_RWD = kernels.causal_conv(
            x_LD, self.weight_DW, self.bias_D, pool[inputs.working_slots_S], inputs.layout
        )
        write_slots(pool, inputs.state_slots_R, windows_RWD)
        return silu(y_LD)

    def decode(self, kernels: Kernels, x_BD: Tensor, inputs: DecodeInputs, memory: MixerMemory) -> Tensor:
        pool = memory.tensors[WINDOW]
        return silu(kernels.conv_step(x_BD, self.weight_DW, self.bias_D, pool, inputs.working_slots_B))

"""The short causal convolution in front of the recurrent mixers: pool windows in, activated channels out.

Shapes: L tokens, B rows, T nodes of a draft tree, N all nodes of B trees, D channels, W conv width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu

from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.memory.pools import TensorSpec
from hybrid_runtime.models.mixers.base import MixerMemory, write_slots
from hybrid_runtime.models.rollback import accepted, note
from hybrid_runtime.ops.kernels import Kernels

WINDOW = "conv"  # of the pool
INPUTS = "conv_inputs"  # of the records


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

    def input_spec(self, dtype: torch.dtype) -> TensorSpec:
        """What is noted down of a node."""
        return TensorSpec((self.weight_DW.shape[0],), dtype)

    def verify(self, kernels: Kernels, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory) -> Tensor:
        """`[N, D]`; notes the inputs down."""
        x_BTD = rearrange(x_ND, "(b t) d -> b t d", t=inputs.num_nodes)
        note(memory.records, {INPUTS: x_BTD}, inputs.request_rows_B)
        y_BTD = kernels.conv_tree(
            x_BTD, self.weight_DW, self.bias_D, memory.tensors[WINDOW], inputs.working_slots_B, inputs.tree
        )
        return silu(rearrange(y_BTD, "b t d -> (b t) d"))

    def commit(self, kernels: Kernels, inputs: CommitInputs, memory: MixerMemory) -> None:
        """Writes the windows behind the accepted paths."""
        noted, path = accepted({INPUTS: memory.records[INPUTS]}, inputs)
        slots = (inputs.working_slots_B, inputs.destinations_B)
        kernels.conv_fold(memory.tensors[WINDOW], *slots, noted[INPUTS], path)

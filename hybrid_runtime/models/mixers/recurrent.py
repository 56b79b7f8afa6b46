"""What the recurrent mixers share: a short convolution, then a recurrence, and how both follow an accepted path.

Shapes: B rows, T nodes of a draft tree, N all nodes of B trees, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import CommitInputs, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.models.mixers.base import Mixer, MixerMemory
from hybrid_runtime.models.mixers.short_conv import INPUTS, ShortConv
from hybrid_runtime.models.rollback import Rollback, TreeForms
from hybrid_runtime.ops.kernels import Kernels


class RecurrentMixer(Mixer):
    """A mixer whose memory is one state per sequence, in the state pool: a conv window, and the state `state_name`."""

    state_name: ClassVar[str]
    kernels: Kernels
    tree_forms: TreeForms  # its recurrence over draft trees

    @abstractmethod
    def state_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype) -> LayerSpec:
        """What one state slot holds for this mixer: conv windows in the model's `dtype`, states in `state_dtype`."""

    @property
    @abstractmethod
    def conv(self) -> ShortConv:
        """Its convolution."""

    @abstractmethod
    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory, rollback: Rollback) -> Tensor:
        """Output `[N, D]` of all nodes of all trees, row by row; writes nothing but records."""

    def commit(self, inputs: CommitInputs, memory: MixerMemory, rollback: Rollback) -> None:
        """Writes the states behind the accepted paths, from the records of the verify before."""
        self.conv.commit(self.kernels, inputs, memory)
        rollback.commit(self.tree_forms, memory.tensors[self.state_name], inputs, memory.records)

    def record_tensors(
        self, dtype: torch.dtype, state_dtype: torch.dtype, num_nodes: int, rollback: Rollback
    ) -> LayerSpec:
        """What is noted down of one row for trees of `num_nodes` nodes."""
        state = self.state_tensors(dtype, state_dtype)[self.state_name]
        of_node = {INPUTS: self.conv.input_spec(dtype), **rollback.record_tensors(self.tree_forms, state)}
        return {name: TensorSpec((num_nodes, *spec.shape), spec.dtype) for name, spec in of_node.items()}

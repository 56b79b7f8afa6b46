"""A step as a function of the tensors of pool indices: model and greedy choice, run eagerly.

Shapes: B rows of a decode, or rows of a prefill whose logits are wanted; D hidden size; V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.models.hybrid_model import HybridModel


class StepOutputs(NamedTuple):
    """What a forward yields for each of its rows."""

    logits_BV: Tensor  # float32, or float64 for a float64 model
    greedy_ids_B: Tensor  # int64, the most likely token (the lowest id of several)
    is_invalid_B: Tensor  # bool, whether there are logits that are not numbers


class Steps(Protocol):
    """The forwards of one model over the pools of one engine. Each writes KV and states in place."""

    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        """Of the tokens that `inputs.logits_tokens_M` names."""

    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        """Of each row."""


class EagerSteps:
    """`Steps` operation by operation, in the model's own forms."""

    def __init__(self, model: HybridModel, memory: StepMemory) -> None:
        self.model = model
        self.memory = memory

    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        return choose_greedily(self.model.prefill(inputs, self.memory))

    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        return choose_greedily(self.model.decode(inputs, self.memory))


def choose_greedily(logits_BV: Tensor) -> StepOutputs:
    """The most likely tokens, and which rows are NaN or +inf (a token may well be at -inf)."""
    return StepOutputs(logits_BV, logits_BV.argmax(dim=-1), ~(logits_BV < torch.inf).all(dim=-1))

"""A step as a function of the tensors of pool indices: model and greedy choice, run eagerly.

Shapes: B rows of a decode, or rows of a prefill whose logits are wanted; D hidden size; V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import IN_FLIGHT, DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.models.hybrid_model import HybridModel


class StepOutputs(NamedTuple):
    """What a forward yields for each of its rows."""

    logits_BV: Tensor  # float32, or float64 for a float64 model
    greedy_ids_B: Tensor  # int64, the most likely token (the lowest id of several)
    is_invalid_B: Tensor  # bool, whether there are logits that are not numbers


class Steps(Protocol):
    """The forwards of one model over the pools of one engine. Each writes KV and states in place.

    Each also writes the greedy token of a row of the request table as the one chosen last for it.
    """

    max_context_len: int  # what decodes expect in their inputs
    can_be_captured: bool  # whether a decode is the same launches in the same order for each batch of a size

    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        """Of the tokens that `inputs.logits_tokens_M` names."""

    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        """Of each row; where the token is IN_FLIGHT, it is the one chosen last for the row of the table."""


class EagerSteps:
    """`Steps` operation by operation, in the model's own forms."""

    can_be_captured = False

    def __init__(self, model: HybridModel, memory: StepMemory, last_token_R: Tensor) -> None:
        self.model = model
        self.memory = memory
        self.last_token_R = last_token_R
        self.max_context_len = memory.req_to_token.shape[1]

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        logits_MV = self.model.prefill(inputs, self.memory)
        return choose_greedily(logits_MV, inputs.logits_rows_M, self.last_token_R)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        known = dataclasses.replace(
            inputs,
            token_ids_B=known_tokens(inputs.token_ids_B, inputs.request_rows_B, self.last_token_R),
            max_context_len=int(inputs.context_lens_B.max()),  # the plain forms read that much of every row
        )
        logits_BV = self.model.decode(known, self.memory)
        return choose_greedily(logits_BV, inputs.request_rows_B, self.last_token_R)


def known_tokens(token_ids_B: Tensor, request_rows_B: Tensor, last_token_R: Tensor) -> Tensor:
    """`token_ids_B` with what is IN_FLIGHT replaced by the token chosen last for its row of the table."""
    return torch.where(token_ids_B == IN_FLIGHT, last_token_R[request_rows_B], token_ids_B)


def choose_greedily(logits_BV: Tensor, request_rows_B: Tensor, last_token_R: Tensor) -> StepOutputs:
    """The most likely tokens, and which rows are NaN or +inf (a token may well be at -inf).

    Writes the tokens to `last_token_R` at `request_rows_B`.
    """
    greedy_ids_B = logits_BV.argmax(dim=-1)
    last_token_R.index_put_((request_rows_B,), greedy_ids_B)
    return StepOutputs(logits_BV, greedy_ids_B, ~(logits_BV < torch.inf).all(dim=-1))

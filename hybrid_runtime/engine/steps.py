"""A step as a function of the tensors of pool indices: model and choice of tokens, run eagerly.

Shapes: B rows of a decode, or rows of a prefill whose logits are wanted; D hidden size; V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import IN_FLIGHT, DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.draw import DrawInputs


class StepOutputs(NamedTuple):
    """What a forward yields for each of its rows."""

    logits_BV: Tensor  # float32, or float64 for a float64 model
    token_ids_B: Tensor  # int64, drawn from these logits
    is_invalid_B: Tensor  # bool, whether there are logits that are not numbers


class Steps(Protocol):
    """The forwards of one model over the pools of one engine. Each writes KV and states in place.

    Each also writes the token drawn for a row of the request table as the one chosen last for it.
    """

    max_context_len: int  # what decodes expect in their inputs
    can_be_captured: bool  # whether a decode is the same launches in the same order for each batch of a size

    def prefill(self, inputs: PrefillInputs, draw: DrawInputs) -> StepOutputs:
        """Of the tokens that `inputs.logits_tokens_M` names. No filter of `draw` is None."""

    def decode(self, inputs: DecodeInputs, draw: DrawInputs) -> StepOutputs:
        """Of each row; where the token is IN_FLIGHT, it is the one chosen last for the row of the table.

        No filter of `draw` is None.
        """


class EagerSteps:
    """`Steps` operation by operation, in the model's own forms."""

    can_be_captured = False

    def __init__(self, model: HybridModel, memory: StepMemory, last_token_R: Tensor) -> None:
        self.model = model
        self.memory = memory
        self.last_token_R = last_token_R
        self.max_context_len = memory.req_to_token.shape[1]

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs, draw: DrawInputs) -> StepOutputs:
        return self._choose(self.model.prefill(inputs, self.memory), draw, inputs.logits_rows_M)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, draw: DrawInputs) -> StepOutputs:
        known = dataclasses.replace(
            inputs,
            token_ids_B=known_tokens(inputs.token_ids_B, inputs.request_rows_B, self.last_token_R),
            max_context_len=int(inputs.context_lens_B.max()),  # the plain forms read that much of every row
        )
        return self._choose(self.model.decode(known, self.memory), draw, inputs.request_rows_B)

    def _choose(self, logits_BV: Tensor, draw: DrawInputs, request_rows_B: Tensor) -> StepOutputs:
        if not draw.temperature_B.any():
            token_ids_B = logits_BV.argmax(dim=-1)
        else:
            token_ids_B = self.model.kernels.draw_tokens(logits_BV, without_idle_filters(draw, logits_BV.shape[1]))
        return outputs_of(logits_BV, token_ids_B, request_rows_B, self.last_token_R)


def known_tokens(token_ids_B: Tensor, request_rows_B: Tensor, last_token_R: Tensor) -> Tensor:
    """`token_ids_B` with what is IN_FLIGHT replaced by the token chosen last for its row of the table."""
    return torch.where(token_ids_B == IN_FLIGHT, last_token_R[request_rows_B], token_ids_B)


def without_idle_filters(draw: DrawInputs, vocab_size: int) -> DrawInputs:
    """None for the filters that change nothing in any row: they would cost the plain form a sort."""
    assert draw.min_p_B is not None
    assert draw.top_k_B is not None
    assert draw.top_p_B is not None
    return draw._replace(
        min_p_B=draw.min_p_B if (draw.min_p_B > 0).any() else None,
        top_k_B=draw.top_k_B if (draw.top_k_B < vocab_size).any() else None,
        top_p_B=draw.top_p_B if (draw.top_p_B < 1).any() else None,
    )


def outputs_of(logits_BV: Tensor, token_ids_B: Tensor, request_rows_B: Tensor, last_token_R: Tensor) -> StepOutputs:
    """The tokens with which rows are NaN or +inf (a token may well be at -inf).

    Writes the tokens to `last_token_R` at `request_rows_B`.
    """
    last_token_R.index_put_((request_rows_B,), token_ids_B)
    return StepOutputs(logits_BV, token_ids_B, ~(logits_BV < torch.inf).all(dim=-1))

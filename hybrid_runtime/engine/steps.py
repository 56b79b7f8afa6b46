"""A step as a function of the tensors of pool indices: model and choice of tokens, run eagerly.

Shapes: B rows of a decode, or rows of a prefill whose logits are wanted; N nodes of all draft trees, row by row;
D hidden size; V vocabulary; R rows of the request table.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import (
    IN_FLIGHT,
    CommitInputs,
    DecodeInputs,
    PrefillInputs,
    StepMemory,
    VerifyInputs,
)
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.rollback import Rollback
from hybrid_runtime.ops.draw import DrawInputs


class StepOutputs(NamedTuple):
    """What a forward yields for each of its rows."""

    logits_BV: Tensor  # float32, or float64 for a float64 model
    token_ids_B: Tensor  # int64, drawn from these logits
    is_invalid_B: Tensor  # bool, whether there are logits that are not numbers


class VerifyOutputs(NamedTuple):
    """What a verify yields for each node."""

    logits_NV: Tensor  # float32, or float64 for a float64 model
    token_ids_N: Tensor  # int64, the token drawn from these logits: what follows the node
    is_invalid_N: Tensor  # bool, whether there are logits that are not numbers
    hidden_ND: Tensor  # the residual stream behind the last block


@dataclasses.dataclass(frozen=True)
class SpeculativeSteps:
    """What steps of a runtime that speculates need besides.

    `hidden_RD`: where each step leaves the residual stream behind the last block, for the rows of the request table
    that it chooses tokens for; None: nobody reads it.
    """

    rollback: Rollback
    num_nodes: int  # of a draft tree at most, the root included
    hidden_RD: Tensor | None


class Steps(Protocol):
    """The forwards of one model over the pools of one engine. Each writes KV and states in place.

    Each also writes the token drawn for a row of the request table as the one chosen last for it.
    """

    max_context_len: int  # what decodes and verifies expect in their inputs
    can_be_captured: bool  # whether a decode, a verify and a commit are the same launches for each batch of a size

    def tree_size(self, num_nodes: int) -> int:
        """How many nodes the draft trees of a verify have that are to hold `num_nodes`, the root included."""

    def prefill(self, inputs: PrefillInputs, draw: DrawInputs) -> StepOutputs:
        """Of the tokens that `inputs.logits_tokens_M` names. No filter of `draw` is None."""

    def decode(self, inputs: DecodeInputs, draw: DrawInputs) -> StepOutputs:
        """Of each row; where the token is IN_FLIGHT, it is the one chosen last for the row of the table.

        No filter of `draw` is None.
        """

    def verify(self, inputs: VerifyInputs, draw: DrawInputs) -> VerifyOutputs:
        """Of the nodes of draft trees. Writes their KV and records, and no state. No filter of `draw` is None."""

    def commit(self, inputs: CommitInputs) -> None:
        """Writes the states behind accepted paths."""


class EagerSteps:
    """`Steps` operation by operation, in the model's own forms."""

    can_be_captured = False

    def __init__(
        self,
        model: HybridModel,
        memory: StepMemory,
        last_token_R: Tensor,
        speculative: SpeculativeSteps | None = None,
    ) -> None:
        self.model = model
        self.memory = memory
        self.last_token_R = last_token_R
        self.speculative = speculative
        self._hidden_RD = None if speculative is None else speculative.hidden_RD
        self.max_context_len = memory.req_to_token.shape[1]

    def tree_size(self, num_nodes: int) -> int:
        return num_nodes

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs, draw: DrawInputs) -> StepOutputs:
        rows_M = inputs.logits_rows_M
        if self._hidden_RD is None:
            return self._choose(self.model.prefill(inputs, self.memory), draw, rows_M)
        return self._choose(self._noted(self.model.prefill_stream(inputs, self.memory), rows_M), draw, rows_M)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, draw: DrawInputs) -> StepOutputs:
        known = dataclasses.replace(
            inputs,
            token_ids_B=known_tokens(inputs.token_ids_B, inputs.request_rows_B, self.last_token_R),
            max_context_len=int(inputs.context_lens_B.max()),  # the plain forms read that much of every row
        )
        rows_B = inputs.request_rows_B
        if self._hidden_RD is None:
            return self._choose(self.model.decode(known, self.memory), draw, rows_B)
        return self._choose(self._noted(self.model.decode_stream(known, self.memory), rows_B), draw, rows_B)

    @torch.no_grad()
    def verify(self, inputs: VerifyInputs, draw: DrawInputs) -> VerifyOutputs:
        assert self.speculative is not None
        inputs = dataclasses.replace(inputs, max_context_len=max(1, int(inputs.committed_lens_B.max())))
        x_ND = self.model.verify_stream(inputs, self.memory, self.speculative.rollback)
        logits_NV = self.model.logits(x_ND)
        return VerifyOutputs(logits_NV, self._draw(logits_NV, draw), is_invalid(logits_NV), x_ND)

    @torch.no_grad()
    def commit(self, inputs: CommitInputs) -> None:
        assert self.speculative is not None
        self.model.commit(inputs, self.memory, self.speculative.rollback)

    def _noted(self, x_BD: Tensor, request_rows_B: Tensor) -> Tensor:
        """The logits `[B, V]` of the stream behind the last block, which is left for the drafter."""
        assert self._hidden_RD is not None
        self._hidden_RD.index_put_((request_rows_B,), x_BD)
        return self.model.logits(x_BD)

    def _choose(self, logits_BV: Tensor, draw: DrawInputs, request_rows_B: Tensor) -> StepOutputs:
        return outputs_of(logits_BV, self._draw(logits_BV, draw), request_rows_B, self.last_token_R)

    def _draw(self, logits_BV: Tensor, draw: DrawInputs) -> Tensor:
        if not draw.temperature_B.any():
            return logits_BV.argmax(dim=-1)
        return self.model.kernels.draw_tokens(logits_BV, without_idle_filters(draw, logits_BV.shape[1]))


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
    return StepOutputs(logits_BV, token_ids_B, is_invalid(logits_BV))


def is_invalid(logits_BV: Tensor) -> Tensor:
    """Which rows have logits that are no numbers, or +inf."""
    return ~(logits_BV < torch.inf).all(dim=-1)

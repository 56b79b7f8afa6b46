"""The tensors of pool indices that one model step reads, and the memory it reads and writes through them.

Shapes: L tokens of all sequences of a prefill, S its sequences, R states it returns, M tokens whose logits are wanted,
B rows of a decode or verify, T nodes of a draft tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.ragged import RaggedLayout

IN_FLIGHT = -1  # stands for the token that the device chose last for a row, which the host does not know yet


@dataclass(frozen=True)
class StepMemory:
    """The pools' tensors, per depth. A step mutates them in place; slot 0 and row 0 are for padding.

    `kv_layers[d]`: the named KV tensors `[kv slots + 1, ...]` of the d-th attention of the model; `state_layers[d]`:
    the named state tensors `[state slots + 1, ...]` of its d-th recurrent mixer; `req_to_token`: int32
    `[rows + 1, max_model_len]`, the KV slot of each position of each request. `record_layers[d]`: what verifies note
    down at that mixer until something is committed, `[rows + 1, T, ...]`; of a runtime that does not speculate, none.
    """

    kv_layers: tuple[Mapping[str, Tensor], ...]
    state_layers: tuple[Mapping[str, Tensor], ...]
    req_to_token: Tensor
    record_layers: tuple[Mapping[str, Tensor], ...] = ()


@dataclass(frozen=True)
class PrefillInputs:
    """One ragged prefill of S sequences; each continues `context_lens_S - layout.lengths_S` tokens in the pools."""

    layout: RaggedLayout
    token_ids_L: Tensor  # int64
    positions_L: Tensor  # int64, absolute position of each token; padding tokens: 0
    kv_slots_L: Tensor  # int64, KV slot that each token's K and V are written to; padding tokens: 0
    request_rows_S: Tensor  # int64, rows of req_to_token; they already name the new tokens' slots
    context_lens_S: Tensor  # int64, on the host: tokens in the pools after this step, the new ones included
    working_slots_S: Tensor  # int64, state slots the sequences start from
    state_slots_R: Tensor  # int64, state slots that the layout's requested states are written to
    logits_tokens_M: Tensor  # int64, flat indices of the tokens whose logits are returned
    logits_rows_M: Tensor  # int64, row of req_to_token whose next token these logits choose; 0: of none


@dataclass(frozen=True)
class DecodeInputs:
    """One token for each of B rows."""

    token_ids_B: Tensor  # int64; IN_FLIGHT must have been replaced before a model reads them
    positions_B: Tensor  # int64, absolute position of the token; padding rows: 0
    kv_slots_B: Tensor  # int64, KV slot its K and V are written to; padding rows: 0
    request_rows_B: Tensor  # int64, rows of req_to_token; padding rows: 0
    context_lens_B: Tensor  # int64, tokens in the pools after this step, this one included; padding rows: 1
    max_context_len: int  # at least every entry of context_lens_B
    working_slots_B: Tensor  # int64, state slots updated in place; padding rows: 0


@dataclass(frozen=True)
class VerifyInputs:
    """A draft tree for each of B rows, T nodes each, root included (see `ops.draft_tree`).

    Nodes that fill a tree up have token 0 and KV slot 0; the nodes of padding rows have, too.
    """

    token_ids_BT: Tensor  # int64
    positions_BT: Tensor  # int64, committed length of the row plus the node's depth
    kv_slots_BT: Tensor  # int64, KV slots that the nodes' K and V are written to
    request_rows_B: Tensor  # int64, rows of req_to_token; padding rows: 0
    committed_lens_B: Tensor  # int64, tokens in the pools, those of the tree not counted; padding rows: 0
    max_context_len: int  # at least every entry of committed_lens_B
    working_slots_B: Tensor  # int64, state slots of the committed states, which are read; padding rows: 0
    tree: DraftTree

    @property
    def num_nodes(self) -> int:
        """T."""
        return self.token_ids_BT.shape[1]


@dataclass(frozen=True)
class CommitInputs:
    """What is to become of the trees of B rows, in the order of the rows that were verified."""

    request_rows_B: Tensor  # int64; padding rows: 0
    working_slots_B: Tensor  # int64, state slots of the committed states
    destinations_B: Tensor  # int64, state slots for the states behind the paths: the same ones, or others; 0: none
    path: AcceptedPath  # its nodes may be fewer than T: those of the longest path


def draw_inputs(fields_FB: Tensor | Sequence[Tensor]) -> DrawInputs:
    """Views of int64 `[fields, B]` as what DrawInputs names, in its order; of float64 fields these are the bits."""
    fields = dict(zip(DrawInputs._fields, fields_FB, strict=True))
    bits = {name: fields[name].view(torch.float64) for name in ("temperature_B", "min_p_B", "top_p_B")}
    return DrawInputs(**{**fields, **bits})

"""Inputs that stand for all others of their kind when steps are compiled, and those of the trial runs.

All of them are padding: they name row 0 and slot 0. Sizes that may vary in calls are marked.

Shapes: L tokens of a prefill, B rows of a decode or verify, T nodes of a draft tree, M tokens whose logits are wanted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hybrid_runtime.graphs.compiled import mark_dynamic
from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, PrefillInputs, VerifyInputs, draw_inputs
from hybrid_runtime.ops.draft_tree import AcceptedPath, draft_tree
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE, RaggedLayout

# Of two example sequences; chosen so that no two sizes of the example are the same.
_LENGTHS = (DEFAULT_CHUNK_SIZE + 6, 9)
_STATE_POSITIONS = ((DEFAULT_CHUNK_SIZE + 6,), (3, 5, 9))
NUM_LOGITS = 7
_NUM_ROWS = 3  # of a verify and a commit
_FEW_NODES = 5  # of a tree whose size may vary


def example_decode(max_context_len: int, device: torch.device) -> DecodeInputs:
    """Two padding rows. The longest context is compiled in: kernels split contexts by it."""

    def zeros() -> Tensor:
        return torch.zeros(2, dtype=torch.int64, device=device)

    inputs = DecodeInputs(
        token_ids_B=zeros(),
        positions_B=zeros(),
        kv_slots_B=zeros(),
        request_rows_B=zeros(),
        context_lens_B=zeros() + 1,
        max_context_len=max_context_len,
        working_slots_B=zeros(),
    )
    mark_dynamic(_tensors(inputs))
    return inputs


def example_prefill(device: torch.device) -> PrefillInputs:
    """Two sequences of the null row."""
    layout = RaggedLayout.build(_LENGTHS, _STATE_POSITIONS, chunk_size=DEFAULT_CHUNK_SIZE, device=device)
    num_tokens, num_states = sum(_LENGTHS), len(layout.state_chunk_R)

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    inputs = PrefillInputs(
        layout=layout,
        token_ids_L=zeros(num_tokens),
        positions_L=zeros(num_tokens),
        kv_slots_L=zeros(num_tokens),
        request_rows_S=zeros(len(_LENGTHS)),
        context_lens_S=torch.tensor(_LENGTHS),
        working_slots_S=zeros(len(_LENGTHS)),
        state_slots_R=zeros(num_states),
        logits_tokens_M=zeros(NUM_LOGITS),
        logits_rows_M=zeros(NUM_LOGITS),
    )
    mark_dynamic([*_tensors(inputs), *_tensors(layout)])
    mark_dynamic([layout.sequence_chunks_SJ], dim=1)
    return inputs


def example_verify(num_nodes: int, max_context_len: int, device: torch.device, *, varying: bool) -> VerifyInputs:
    """Of trees of `num_nodes` nodes or, where their size is `varying`, of up to so many.

    As in a decode, the longest context is compiled in.
    """
    inputs = verify_of_padding(_NUM_ROWS, min(num_nodes, _FEW_NODES) if varying else num_nodes, max_context_len, device)
    tensors = [*_tensors(inputs), *inputs.tree]
    mark_dynamic(tensors)
    if varying:
        for tensor in tensors:
            for dim in range(1, tensor.dim()):
                mark_dynamic([tensor], dim)
    return inputs


def verify_of_padding(num_rows: int, num_nodes: int, max_context_len: int, device: torch.device) -> VerifyInputs:
    """Trees of a root and its children."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return VerifyInputs(
        token_ids_BT=zeros(num_rows, num_nodes),
        positions_BT=zeros(num_rows, num_nodes),
        kv_slots_BT=zeros(num_rows, num_nodes),
        request_rows_B=zeros(num_rows),
        committed_lens_B=zeros(num_rows),
        max_context_len=max_context_len,
        working_slots_B=zeros(num_rows),
        tree=draft_tree(zeros(num_rows, num_nodes)),
    )


def example_commit(num_nodes: int, device: torch.device, *, varying: bool) -> CommitInputs:
    """Paths with room for `num_nodes` nodes or, where that is `varying`, for up to so many."""
    inputs = commit_of_padding(_NUM_ROWS, min(num_nodes, _FEW_NODES) if varying else num_nodes, device)
    mark_dynamic([*_tensors(inputs), *inputs.path])
    if varying:
        mark_dynamic([inputs.path.nodes_BT], 1)
    return inputs


def commit_of_padding(num_rows: int, num_nodes: int, device: torch.device) -> CommitInputs:
    """Rows that accept nothing."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    path = AcceptedPath(zeros(num_rows, num_nodes), zeros(num_rows))
    return CommitInputs(zeros(num_rows), zeros(num_rows), zeros(num_rows), path)


def example_draw(num_rows: int, device: torch.device) -> DrawInputs:
    """Greedy rows."""
    draw = draw_inputs(torch.zeros(len(DrawInputs._fields), num_rows, dtype=torch.int64, device=device))
    mark_dynamic([option for option in draw if option is not None])
    return draw


def _tensors(inputs: PrefillInputs | DecodeInputs | VerifyInputs | CommitInputs | RaggedLayout) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]

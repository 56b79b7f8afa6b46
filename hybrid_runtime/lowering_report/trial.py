"""Small steps on the CPU, to be run on different data: whatever differs between the runs, a graph would freeze.

Shapes: B rows, T nodes of a draft tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_runtime.graphs.lowering.step import Trial
from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, StepMemory, VerifyInputs
from hybrid_runtime.lowering_report.models import build_model
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.rollback import ROLLBACKS
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, draft_tree

_BATCH, _CONTEXT, _SLOTS, _NODES = 3, 16, 48, 4


def decode_trial(architecture: str) -> Trial:
    """Decode of a small model: full rows of random lengths first, then one row beside padding."""
    model = build_model(architecture, "cpu", torch.float32, small=True)
    memory = _memory(model)
    inputs = DecodeInputs(
        token_ids_B=_zeros(),
        positions_B=_zeros(),
        kv_slots_B=_zeros(),
        request_rows_B=_zeros(),
        context_lens_B=_zeros(),
        max_context_len=_CONTEXT,
        working_slots_B=_zeros(),
    )
    static = [*vars(inputs).values(), memory.req_to_token, *_pools(memory)]
    return Trial(
        function=lambda: model.decode(inputs, memory).argmax(-1),
        static=[value for value in static if isinstance(value, Tensor)],
        fills=[_fill(inputs, memory, num_rows=num_rows, seed=num_rows) for num_rows in (_BATCH, 1)],
    )


def round_trial(architecture: str) -> Trial:
    """Verify and commit of a small model, with the rollback `fold`: trees of any form, then one row beside padding."""
    model, rollback = build_model(architecture, "cpu", torch.float32, small=True), ROLLBACKS["fold"]
    records = RecordPlan(model.record_layers(_NODES, rollback), _BATCH + 1).allocate(torch.device("cpu"))
    memory = dataclasses.replace(_memory(model), record_layers=records)
    tree = DraftTree(*(value.clone() for value in draft_tree(_zeros(_NODES))))
    verify = VerifyInputs(
        token_ids_BT=_zeros(_NODES),
        positions_BT=_zeros(_NODES),
        kv_slots_BT=_zeros(_NODES),
        request_rows_B=_zeros(),
        committed_lens_B=_zeros(),
        max_context_len=_CONTEXT,
        working_slots_B=_zeros(),
        tree=tree,
    )
    path = AcceptedPath(_zeros(_NODES), _zeros())
    commit = CommitInputs(verify.request_rows_B, verify.working_slots_B, verify.working_slots_B, path)

    def verify_and_commit() -> Tensor:
        tokens_N = model.logits(model.verify_stream(verify, memory, rollback)).argmax(-1)
        model.commit(commit, memory, rollback)
        return tokens_N

    static = [*vars(verify).values(), *tree, *path, memory.req_to_token, *_pools(memory)]
    return Trial(
        function=verify_and_commit,
        static=[value for value in static if isinstance(value, Tensor)],
        fills=[_fill_round(verify, path, memory, num_rows=num_rows, seed=num_rows) for num_rows in (_BATCH, 1)],
    )


def _memory(model: HybridModel) -> StepMemory:
    kv, state = Pool(model.kv_layers(), _SLOTS), Pool(model.state_layers(), _SLOTS)
    return StepMemory(kv.layers, state.layers, torch.zeros(_BATCH + 1, _CONTEXT, dtype=torch.int32))


def _pools(memory: StepMemory) -> list[Tensor]:
    layers = (*memory.kv_layers, *memory.state_layers, *memory.record_layers)
    return [tensor for layer in layers for tensor in layer.values()]


def _zeros(*of_row: int) -> Tensor:
    return torch.zeros(_BATCH, *of_row, dtype=torch.int64)


def _fill(inputs: DecodeInputs, memory: StepMemory, *, num_rows: int, seed: int) -> Callable[[], None]:
    """What writes `num_rows` requests, and padding for the other rows, into the static tensors."""

    def fill() -> None:
        generator = torch.Generator().manual_seed(seed)
        is_padding_B = torch.arange(_BATCH) >= num_rows
        _fill_memory(memory, generator)
        context_lens_B = torch.randint(1, _CONTEXT + 1, (_BATCH,), generator=generator)
        inputs.token_ids_B.random_(0, 64, generator=generator)
        inputs.context_lens_B.copy_(context_lens_B.masked_fill(is_padding_B, 1))
        inputs.positions_B.copy_(inputs.context_lens_B - 1)
        inputs.kv_slots_B.copy_(_distinct(_BATCH, generator).masked_fill(is_padding_B, 0))
        inputs.request_rows_B.copy_(torch.arange(1, _BATCH + 1).masked_fill(is_padding_B, 0))
        inputs.working_slots_B.copy_(_distinct(_BATCH, generator).masked_fill(is_padding_B, 0))

    return fill


def _fill_round(
    inputs: VerifyInputs, path: AcceptedPath, memory: StepMemory, *, num_rows: int, seed: int
) -> Callable[[], None]:
    """As `_fill`. Of each tree the path down to its last node is accepted, of padding rows nothing."""

    def fill() -> None:
        generator = torch.Generator().manual_seed(seed)
        is_padding_B = torch.arange(_BATCH) >= num_rows
        _fill_memory(memory, generator)
        above_T = torch.arange(_NODES).clamp(min=1)
        parents_BT = (torch.rand(_BATCH, _NODES, generator=generator) * above_T).long()
        for static, value in zip(
            inputs.tree, draft_tree(parents_BT.masked_fill(is_padding_B[:, None], 0)), strict=True
        ):
            static.copy_(value)
        inputs.token_ids_BT.random_(0, 64, generator=generator)
        inputs.committed_lens_B.random_(0, _CONTEXT + 1, generator=generator).masked_fill_(is_padding_B, 0)
        inputs.positions_BT.copy_(inputs.committed_lens_B[:, None] + inputs.tree.depths_BT)
        slots_BT = _distinct(_BATCH * _NODES, generator).view(_BATCH, _NODES)
        inputs.kv_slots_BT.copy_(slots_BT.masked_fill(is_padding_B[:, None], 0))
        inputs.request_rows_B.copy_(torch.arange(1, _BATCH + 1).masked_fill(is_padding_B, 0))
        inputs.working_slots_B.copy_(_distinct(_BATCH, generator).masked_fill(is_padding_B, 0))
        sees_last_BT = inputs.tree.ancestors_BTT[:, -1]
        path.num_nodes_B.copy_(sees_last_BT.sum(-1).masked_fill(is_padding_B, 0))
        path.nodes_BT.copy_(sees_last_BT.int().argsort(dim=-1, descending=True, stable=True))

    return fill


def _fill_memory(memory: StepMemory, generator: torch.Generator) -> None:
    for pool in _pools(memory):
        pool.normal_(generator=generator)
    memory.req_to_token.copy_(_distinct(_CONTEXT, generator).expand_as(memory.req_to_token))


def _distinct(number: int, generator: torch.Generator) -> Tensor:
    return 1 + torch.randperm(_SLOTS, generator=generator)[:number]

"""The graphs of a verify and of a commit, cut as the engine compiles them, with the rollback `fold`.

Shapes: B rows, T nodes of a draft tree, N = B T nodes row by row, D hidden size, R rows of the request table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybrid_runtime.engine.compiled_layers import commit_states
from hybrid_runtime.engine.compiled_steps import choose_tokens, embed_tokens
from hybrid_runtime.graphs.compiled import mark_dynamic
from hybrid_runtime.graphs.lowering.step import Step, Trial
from hybrid_runtime.graphs.step_inputs import CommitInputs, StepMemory, VerifyInputs
from hybrid_runtime.lowering_report.fake_inputs import (
    BATCH,
    CONTEXT,
    dynamic_draw,
    indices,
    kinds_of_layers,
    mixer_kind,
    pools_of,
    tensors_of,
)
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import RecurrentMixer
from hybrid_runtime.models.rollback import ROLLBACKS, Rollback
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree
from hybrid_runtime.speculative_config import DEFAULT_TREE_SIZE

RECORD_ROWS = 257  # prime, as `PoolArgument` asks


def speculative_steps(architecture: str, model: HybridModel, memory: StepMemory, trial: Trial) -> Iterator[Step]:
    """Verifies and commits of trees of `DEFAULT_TREE_SIZE` nodes. The number of rows is dynamic, that of nodes is not.

    `memory` has no records yet. `trial`: of both.
    """
    rollback = ROLLBACKS["fold"]
    layers = model.record_layers(DEFAULT_TREE_SIZE, rollback)
    records = RecordPlan(layers, RECORD_ROWS, rollback.shared_records).allocate(torch.device("cuda"))
    memory = StepMemory(memory.kv_layers, memory.state_layers, memory.req_to_token, records)
    yield from _verify_steps(f"{architecture} verify", model, memory, rollback, trial)
    yield from _commit_steps(f"{architecture} commit", model, memory, rollback)


def _verify_steps(
    name: str, model: HybridModel, memory: StepMemory, rollback: Rollback, trial: Trial
) -> Iterator[Step]:
    inputs, last_token_R = _verify_inputs(), indices(BATCH + 1)
    num_nodes = BATCH * inputs.num_nodes
    token_ids_N, nowhere_N = indices(num_nodes), indices(num_nodes)
    x_ND = torch.empty(num_nodes, model.spec.hidden_size, dtype=model.dtype, device="cuda")
    mark_dynamic([x_ND, token_ids_N, nowhere_N])
    yield Step(f"{name}, first", embed_tokens, (model, token_ids_N, nowhere_N, last_token_R), trial=trial)
    for kind, block, memories in kinds_of_layers(model, memory):
        pools = pools_of(block, memories, kv_rows=BATCH * (CONTEXT + inputs.num_nodes), state_rows=BATCH)
        yield Step(f"{name}, {kind}", block.verify, (x_ND, inputs, memories, rollback), pools)
    yield Step(f"{name}, last", choose_tokens, (model, x_ND, nowhere_N, last_token_R, dynamic_draw(num_nodes)))


def _commit_steps(name: str, model: HybridModel, memory: StepMemory, rollback: Rollback) -> Iterator[Step]:
    inputs = _commit_inputs()
    seen: set[str] = set()
    for block, memories in zip(model.blocks, model.memories(memory), strict=True):
        kind = mixer_kind(block.spec)
        if block.mixing is not None and any(isinstance(m, RecurrentMixer) for m in block.mixers) and kind not in seen:
            seen.add(kind)
            pools = pools_of(block, memories, kv_rows=0, state_rows=BATCH)
            arguments = (block.mixing, inputs.request_rows_B, inputs, memories, rollback)
            yield Step(f"{name}, {kind}", commit_states, arguments, pools)


def _verify_inputs() -> VerifyInputs:
    nodes = (BATCH, DEFAULT_TREE_SIZE)
    inputs = VerifyInputs(
        token_ids_BT=indices(*nodes),
        positions_BT=indices(*nodes),
        kv_slots_BT=indices(*nodes),
        request_rows_B=indices(BATCH),
        committed_lens_B=indices(BATCH),
        max_context_len=CONTEXT,
        working_slots_B=indices(BATCH),
        tree=DraftTree(
            indices(*nodes), indices(*nodes), torch.empty(*nodes, nodes[1], dtype=torch.bool, device="cuda")
        ),
    )
    mark_dynamic([*tensors_of(inputs), *inputs.tree])
    return inputs


def _commit_inputs() -> CommitInputs:
    def per_row() -> Tensor:
        return indices(BATCH)

    path = AcceptedPath(indices(BATCH, DEFAULT_TREE_SIZE), per_row())
    inputs = CommitInputs(per_row(), per_row(), per_row(), path)
    mark_dynamic([*tensors_of(inputs), *path])
    return inputs

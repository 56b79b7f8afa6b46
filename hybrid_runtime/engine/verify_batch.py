"""What the verify of a step reads, as host arrays.

Shapes: B rows, T nodes of a draft tree, N = B T nodes row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_runtime.engine.batches import Indices, build_draw
from hybrid_runtime.graphs.verify_runner import DRAW_FIELDS, NODE_FIELDS, ROW_FIELDS
from hybrid_runtime.memory.request_table import RequestTable
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.sampling import SamplingRow
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import VerifyRow

_POSITIONS = DrawInputs._fields.index("positions_B")


@dataclass(frozen=True)
class VerifyBatch:
    """Inputs of a verify. Nodes behind a row's own fill its tree up: children of the root that nothing is read of."""

    token_ids_BT: Indices
    parents_BT: Indices
    depths_BT: Indices
    ancestor_bits_BT: Indices  # bit j of node i: j is i or an ancestor of i
    kv_slots_BT: Indices
    request_rows_B: Indices
    committed_lens_B: Indices
    working_slots_B: Indices
    num_nodes_B: Indices  # of each row's own, the root included
    draw_FN: Indices  # what `graphs.step_inputs.draw_inputs` takes

    def arrays(self) -> dict[str, Indices]:
        """What `VerifyRunner.run` takes."""
        return {
            **{name: getattr(self, name) for name in ROW_FIELDS},
            **{name: getattr(self, name) for name in NODE_FIELDS if name != "positions_BT"},
            "positions_BT": self.committed_lens_B[:, None] + self.depths_BT,
            **dict(zip(DRAW_FIELDS, self.draw_FN, strict=True)),
        }


@dataclass(frozen=True)
class NodeSampling:
    """How the tokens behind some nodes are chosen, where a plain draw does not do."""

    nodes: tuple[int, ...]  # of the N
    rows: tuple[SamplingRow, ...]


@dataclass(frozen=True)
class PreparedVerify:
    requests: tuple[Request, ...]  # [B]
    batch: VerifyBatch
    sampling: NodeSampling | None
    max_accepted: tuple[int, ...]  # [B] nodes, the root included


def prepare_verify(rows: Sequence[VerifyRow], table: RequestTable, num_nodes: int) -> PreparedVerify:
    """`num_nodes`: T, at least those of each draft and its root."""
    requests = tuple(row.request for row in rows)
    batch = _build_batch(rows, table, num_nodes)
    return PreparedVerify(
        requests,
        batch,
        _node_sampling(rows, batch),
        tuple(request.tokens.max_len - len(request.tokens) for request in requests),
    )


def _build_batch(rows: Sequence[VerifyRow], table: RequestTable, num_nodes: int) -> VerifyBatch:
    num_rows = len(rows)
    token_ids_BT = np.zeros((num_rows, num_nodes), dtype=np.int64)
    parents_BT = np.zeros_like(token_ids_BT)
    kv_slots_BT = np.zeros_like(token_ids_BT)
    for place, row in enumerate(rows):
        count = 1 + len(row.draft)
        token_ids_BT[place, 0] = row.request.tokens.last
        token_ids_BT[place, 1:count] = row.draft.token_ids
        parents_BT[place, 1:count] = row.draft.parents
        kv_slots_BT[place, :count] = table.slots[row.request.resident.row, row.position : row.position + count]
    depths_BT, ancestor_bits_BT = _paths(parents_BT)
    committed_lens_B = np.array([row.position for row in rows], dtype=np.int64)
    draw_FB = build_draw([row.request for row in rows], [row.position + 1 for row in rows])
    draw_FN = np.repeat(draw_FB, num_nodes, axis=1)
    draw_FN[_POSITIONS] += depths_BT.reshape(-1)
    return VerifyBatch(
        token_ids_BT=token_ids_BT,
        parents_BT=parents_BT,
        depths_BT=depths_BT,
        ancestor_bits_BT=ancestor_bits_BT,
        kv_slots_BT=kv_slots_BT,
        request_rows_B=np.array([row.request.resident.row for row in rows], dtype=np.int64),
        committed_lens_B=committed_lens_B,
        working_slots_B=np.array([row.request.resident.working_slot for row in rows], dtype=np.int64),
        num_nodes_B=np.array([1 + len(row.draft) for row in rows], dtype=np.int64),
        draw_FN=draw_FN,
    )


def _paths(parents_BT: Indices) -> tuple[Indices, Indices]:
    """Depths, and the bits of each node and its ancestors."""
    num_rows, num_nodes = parents_BT.shape
    row_B = np.arange(num_rows)
    depths_BT, bits_BT = np.zeros_like(parents_BT), np.ones_like(parents_BT)
    for node in range(1, num_nodes):
        parent_B = parents_BT[:, node]
        depths_BT[:, node] = depths_BT[row_B, parent_B] + 1
        bits_BT[:, node] = bits_BT[row_B, parent_B] | np.left_shift(1, node)
    return depths_BT, bits_BT


def _path_to(node: int, bits_T: Indices) -> Indices:
    """The nodes from the root to one, with these bits of a tree's nodes."""
    return np.flatnonzero(bits_T[node] >> np.arange(len(bits_T)) & 1)


def _node_sampling(rows: Sequence[VerifyRow], batch: VerifyBatch) -> NodeSampling | None:
    """For requests with penalties, biases or forbidden tokens: each node has a history of its own."""
    num_nodes = batch.token_ids_BT.shape[1]
    nodes: list[int] = []
    sampling: list[SamplingRow] = []
    for place, row in enumerate(rows):
        request, params = row.request, row.request.params
        if not (params.has_penalty or params.logit_bias or request.forbidden_token_ids):
            continue
        for node in range(int(batch.num_nodes_B[place])):
            path = _path_to(node, batch.ancestor_bits_BT[place])[1:]
            nodes.append(place * num_nodes + node)
            sampling.append(
                SamplingRow(
                    params=params,
                    seed=request.seed,
                    sample_index=request.sample_index,
                    position=row.position + 1 + len(path),
                    prompt_token_ids=request.tokens.prompt,
                    output_token_ids=np.concatenate([request.tokens.output, batch.token_ids_BT[place, path]]),
                    forbidden_token_ids=request.forbidden_after(len(request.tokens) + len(path)),
                )
            )
    return NodeSampling(tuple(nodes), tuple(sampling)) if nodes else None

"""Drafts with a multi-token-prediction head.

Shapes: B rows, M nodes of a row that a step expands, N = B M of them all, K children of each, D hidden size, R rows of
the request table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import StepMemory
from hybrid_runtime.models.mtp import MtpHead
from hybrid_runtime.speculative.draft import Draft, DraftRow
from hybrid_runtime.speculative.tree_choice import TreeBuilder

_EMPTY = Draft.chain(())


class MtpDrafter:
    """Runs the head step by step over the rows that may draft, from the hidden state that predicted each one's root.

    A chain takes the likeliest token at each step, a tree the best of the candidates (see `TreeBuilder`).
    """

    def __init__(
        self, head: MtpHead, memory: StepMemory, hidden_RD: Tensor, *, topk: int, num_steps: int, max_nodes: int
    ) -> None:
        """`hidden_RD`: the target's, by rows of the request table. `max_nodes` do not count the root."""
        self._head = head
        self._memory = memory
        self._hidden_RD = hidden_RD
        self._topk = topk
        self._num_steps = num_steps
        self._max_nodes = max_nodes

    @torch.no_grad()
    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        able = [row for row in rows if row.max_nodes > 0]
        drafts = iter(self._draft(able) if able else ())
        return [next(drafts) if row.max_nodes > 0 else _EMPTY for row in rows]

    def _draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        device = self._hidden_RD.device
        longest = max(row.max_nodes for row in rows)
        num_steps = min(self._num_steps, longest)
        builder = TreeBuilder(self._topk, num_steps, self._max_nodes_of(num_steps))
        rows_B = torch.tensor([row.row for row in rows], device=device)
        lens_B = torch.tensor([len(row.tokens) - 1 for row in rows], device=device)
        max_context_len = max(len(row.tokens) - 1 for row in rows)
        token_ids_BM = torch.tensor([[int(row.tokens[-1])] for row in rows], device=device)
        hidden_BMD = self._hidden_RD[rows_B][:, None]
        for step in range(num_steps):
            num_beams = token_ids_BM.shape[1]
            logits_NV, hidden_ND = self._head.step(
                token_ids_BM.flatten(),
                hidden_BMD.flatten(0, 1),
                lens_B.repeat_interleave(num_beams),
                rows_B.repeat_interleave(num_beams),
                lens_B.repeat_interleave(num_beams),
                max_context_len,
                self._memory,
            )
            top_NK, ids_NK = torch.log_softmax(logits_NV, dim=-1).topk(self._topk, dim=-1)
            frontier = builder.add_level(
                ids_NK.unflatten(0, (-1, num_beams)).cpu().numpy().astype(np.int32),
                top_NK.unflatten(0, (-1, num_beams)).double().cpu().numpy(),
            )
            if step + 1 < num_steps:
                beams_BK = torch.from_numpy(frontier.beams_BK).to(device)
                place_B1 = torch.arange(len(rows), device=device)[:, None]
                hidden_BMD = hidden_ND.unflatten(0, (-1, num_beams))[place_B1, beams_BK]
                token_ids_BM = torch.from_numpy(frontier.token_ids_BK.astype(np.int64)).to(device)
        return builder.drafts([row.max_nodes for row in rows])

    def _max_nodes_of(self, num_steps: int) -> int:
        """Where rows may draft little, fewer steps have fewer candidates."""
        return min(self._max_nodes, self._topk + (num_steps - 1) * self._topk**2)

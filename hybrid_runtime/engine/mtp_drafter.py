"""Drafts with a multi-token-prediction head.

Shapes: B rows, M nodes of a row that a step expands, N = B M of them all, K children of each, D hidden size, R rows of
the request table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.engine.code_digest import code_digest
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.step_inputs import StepMemory
from hybrid_runtime.models.mtp import MtpHead
from hybrid_runtime.speculative.draft import Draft, DraftRow
from hybrid_runtime.speculative.tree_choice import TreeBuilder

_EMPTY = Draft.chain(())


class DraftStep(Protocol):
    """One step of a head for N nodes: tokens `[N]` and their parents' hidden states `[N, D]`; committed lengths and
    rows of the request table, `[N]`. All but the hidden states are int64.
    """

    def __call__(
        self, token_ids_N: Tensor, hidden_ND: Tensor, lens_N: Tensor, rows_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The most likely tokens behind each node, best first: log probabilities and ids `[N, K]`; hidden states."""


def best_tokens(
    head: MtpHead,
    token_ids_N: Tensor,
    hidden_ND: Tensor,
    lens_N: Tensor,
    rows_N: Tensor,
    max_context_len: int,
    memory: StepMemory,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`DraftStep`, of a head."""
    logits_NV, hidden_ND = head.step(token_ids_N, hidden_ND, lens_N, rows_N, lens_N, max_context_len, memory)
    top_NK, ids_NK = torch.log_softmax(logits_NV, dim=-1).topk(topk, dim=-1)
    return top_NK, ids_NK, hidden_ND


@dataclass(frozen=True)
class EagerDraftStep:
    """Operation by operation."""

    head: MtpHead
    memory: StepMemory
    topk: int

    @torch.no_grad()
    def __call__(
        self, token_ids_N: Tensor, hidden_ND: Tensor, lens_N: Tensor, rows_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        longest = int(lens_N.max())  # the plain forms read that much of every row
        return best_tokens(self.head, token_ids_N, hidden_ND, lens_N, rows_N, longest, self.memory, self.topk)


class CompiledDraftStep:
    """As one graph for any number of nodes, on a CPU."""

    def __init__(self, head: MtpHead, memory: StepMemory, topk: int) -> None:
        """Compiles. The head must run the forms of `compiled_kernels`."""
        nodes = [torch.full((3,), value) for value in (0, 1, 0)]
        hidden_ND = torch.zeros(3, head.target.spec.hidden_size, dtype=head.target.dtype)
        mark_dynamic([*nodes, hidden_ND])
        token_ids_N, lens_N, rows_N = nodes
        self._rest = (1, memory, topk)  # kernels go by the row: the longest context means nothing
        self._head = head
        self._run = CompiledFunction(
            best_tokens, head, token_ids_N, hidden_ND, lens_N, rows_N, *self._rest, code=code_digest()
        )

    @torch.no_grad()
    def __call__(
        self, token_ids_N: Tensor, hidden_ND: Tensor, lens_N: Tensor, rows_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._run(self._head, token_ids_N, hidden_ND, lens_N, rows_N, *self._rest)


class MtpDrafter:
    """Runs the head step by step over the rows that may draft, from the hidden state that predicted each one's root.

    A chain takes the likeliest token at each step, a tree the best of the candidates (see `TreeBuilder`).
    """

    def __init__(self, step: DraftStep, hidden_RD: Tensor, *, topk: int, num_steps: int, max_nodes: int) -> None:
        """`hidden_RD`: the target's, by rows of the request table. `max_nodes` do not count the root."""
        self._step = step
        self._hidden_RD = hidden_RD
        self._topk = topk
        self._num_steps = num_steps
        self._max_nodes = max_nodes

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        able = [row for row in rows if row.max_nodes > 0]
        # The dtypes are the runtime's business, whatever block of its user's the call stands in.
        with torch.autocast(self._hidden_RD.device.type, enabled=False):
            drafts = iter((self._chains(able) if self._topk == 1 else self._trees(able)) if able else ())
        return [next(drafts) if row.max_nodes > 0 else _EMPTY for row in rows]

    def _chains(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """The likeliest token at each step; nothing is read back before the last."""
        token_ids_B, rows_B, lens_B, num_steps = self._roots(rows)
        hidden_BD = self._hidden_RD[rows_B]
        chosen = []
        for _ in range(num_steps):
            _, ids_B1, hidden_BD = self._step(token_ids_B, hidden_BD, lens_B, rows_B)
            token_ids_B = ids_B1[:, 0]
            chosen.append(token_ids_B)
        ids_BS = torch.stack(chosen, dim=1).cpu().numpy().astype(np.int32)
        return [Draft.chain(ids_S[: row.max_nodes]) for ids_S, row in zip(ids_BS, rows, strict=True)]

    def _roots(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor, Tensor, int]:
        """Tokens, rows and committed lengths, int64 `[B]`, and how many steps any row has a use for."""
        fields_3B = np.array([(row.tokens[-1], row.row, len(row.tokens) - 1) for row in rows], dtype=np.int64).T
        token_ids_B, rows_B, lens_B = torch.from_numpy(fields_3B.copy()).to(self._hidden_RD.device)
        return token_ids_B, rows_B, lens_B, min(self._num_steps, max(row.max_nodes for row in rows))

    def _trees(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """The best of the candidates."""
        device = self._hidden_RD.device
        root_ids_B, rows_B, lens_B, num_steps = self._roots(rows)
        builder = TreeBuilder(self._topk, num_steps, self._max_nodes_of(num_steps))
        token_ids_BM = root_ids_B[:, None]
        hidden_BMD = self._hidden_RD[rows_B][:, None]
        for step in range(num_steps):
            num_beams = token_ids_BM.shape[1]
            top_NK, ids_NK, hidden_ND = self._step(
                token_ids_BM.flatten(),
                hidden_BMD.flatten(0, 1),
                lens_B.repeat_interleave(num_beams),
                rows_B.repeat_interleave(num_beams),
            )
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

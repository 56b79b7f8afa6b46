"""The recurrent ops, whose tree forms share one contract: random operands of a tree, and what its paths should give.

Shapes: B rows, T nodes of a tree, L flat tokens of all paths, G groups or key heads, H heads; a state's dims are P, N
(Mamba-2) or V, K (delta rules).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybrid_runtime.ops import gdn, gdn_tree, kda, kda_tree, mamba2, mamba2_tree
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.tree_cases import Parents, PathBatch, build_tree

Nodes = tuple[Tensor, ...]


@dataclass(frozen=True)
class TreeCase:
    op: Mamba2 | DeltaRule
    parents: Sequence[Parents]
    tree: DraftTree
    nodes: Nodes  # operands of every node, [B, T, ...]
    shared: Nodes  # operands that all nodes share
    pool: Tensor  # NaN in slots of no row
    slots_B: Tensor  # 0 for padding rows

    def to(self, tokens: torch.dtype, state: torch.dtype) -> TreeCase:
        """As a model hands them over: decays, β and states in `state`, all else in `tokens`."""
        nodes = tuple(x.to(state if i in self.op.wide else tokens) for i, x in enumerate(self.nodes))
        return replace(self, nodes=nodes, shared=tuple(x.to(state) for x in self.shared), pool=self.pool.to(state))

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs and states of all nodes, from the recurrence along every path."""
        paths = PathBatch.of(self.parents)
        nodes_L = tuple(paths.tokens(x_BT) for x_BT in self.nodes)
        y_L, states_L = self.op.recurrent(nodes_L, self.shared, self.pool[self.slots_B][paths.rows_S], paths.layout)
        return y_L[paths.tokens_BT], states_L[paths.tokens_BT]

    def verify(self) -> tuple[Tensor, Tensor | None]:
        """Outputs and, of a delta rule, u."""
        return self.op.verify(self.nodes, self.shared, self.pool, self.slots_B, self.tree)

    def fold(self, u: Tensor | None, destinations_B: Tensor, path: AcceptedPath) -> None:
        self.op.fold(self.nodes, self.shared, self.pool, self.slots_B, destinations_B, u, path)

    def walk(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Outputs and states of all nodes from the form that makes all states."""
        node_states = self.pool.new_full((*self.tree.parents_BT.shape, *self.pool.shape[1:]), math.nan, dtype=dtype)
        y_BT = self.op.tree_states(self.nodes, self.shared, self.pool, self.slots_B, self.tree, node_states)
        return y_BT, node_states


@dataclass(frozen=True)
class Dims:
    groups: int = 2
    copies: int = 2
    key: int = 8
    value: int = 5


class Mamba2:
    """Its nodes are x, dt, b, c; the places of those that tests ask for."""

    wide, added, decays, read_by_the_node_alone = (1,), 0, 1, 3

    def __repr__(self) -> str:
        return "mamba2"

    def make(self, batch: tuple[int, int], dims: Dims, decay_BTHK: Tensor, generator: torch.Generator):
        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        num_heads = dims.groups * dims.copies
        a_H = -randn(num_heads).exp()
        nodes = (
            randn(*batch, num_heads, dims.value),
            decay_BTHK[..., 0] / -a_H,
            randn(*batch, dims.groups, dims.key),
            randn(*batch, dims.groups, dims.key),
        )
        return nodes, (a_H,)

    def recurrent(self, nodes: Nodes, shared: Nodes, s0: Tensor, layout: RaggedLayout) -> tuple[Tensor, Tensor]:
        (x, dt, b, c), (a,) = nodes, shared
        return mamba2.mamba2_recurrent(x, dt, a, b, c, s0, layout)

    def verify(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B: Tensor, tree: DraftTree):
        (x, dt, b, c), (a,) = nodes, shared
        return mamba2_tree.mamba2_tree(x, dt, a, b, c, pool, slots_B, tree), None

    def fold(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B, destinations_B, u: Tensor | None, path) -> None:
        (x, dt, b, _), (a,) = nodes, shared
        mamba2_tree.mamba2_fold(pool, slots_B, destinations_B, dt, a, x, b, path)

    def tree_states(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B, tree, node_states) -> Tensor:
        (x, dt, b, c), (a,) = nodes, shared
        return mamba2_tree.mamba2_tree_states(x, dt, a, b, c, pool, slots_B, tree, node_states)

    def magnitude(self, case: TreeCase, y_BT: Tensor, states_BT: Tensor) -> float:
        """The largest sum of absolute values behind a result."""
        x, dt, b, c = (x.abs() for x in case.nodes)
        sizes = replace(case, nodes=(x, dt, b, c), pool=case.pool.abs()).expected()
        return max(size.max().item() for size in sizes)


@dataclass(frozen=True)
class DeltaRule:
    """Its nodes are q, k, v, log a, β; the places of those that tests ask for."""

    name: str
    recurrent_form: Callable[..., tuple[Tensor, Tensor]]
    tree_form: Callable[..., tuple[Tensor, Tensor]]
    fold_form: Callable[..., None]
    states_form: Callable[..., Tensor]
    decays_per_channel: bool
    wide, added, decays, read_by_the_node_alone = (3, 4), 2, 3, 0

    def __repr__(self) -> str:
        return self.name

    def make(self, batch: tuple[int, int], dims: Dims, decay_BTHK: Tensor, generator: torch.Generator):
        """Keys of a head resemble each other, which makes the system hard."""

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        num_heads = dims.groups * dims.copies
        nodes = (
            normalize(randn(*batch, dims.groups, dims.key), dim=-1),
            normalize(randn(dims.groups, dims.key) + 0.5 * randn(*batch, dims.groups, dims.key), dim=-1),
            randn(*batch, num_heads, dims.value),
            -decay_BTHK if self.decays_per_channel else -decay_BTHK[..., 0],
            torch.rand(*batch, num_heads, generator=generator, dtype=torch.float64),
        )
        return nodes, ()

    def recurrent(self, nodes: Nodes, shared: Nodes, s0: Tensor, layout: RaggedLayout) -> tuple[Tensor, Tensor]:
        return self.recurrent_form(*nodes, s0, layout)

    def verify(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B: Tensor, tree: DraftTree):
        return self.tree_form(*nodes, pool, slots_B, tree)

    def fold(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B, destinations_B, u: Tensor | None, path) -> None:
        _, k, _, log_a, _ = nodes
        self.fold_form(pool, slots_B, destinations_B, k, u, log_a, path)

    def tree_states(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B, tree, node_states) -> Tensor:
        return self.states_form(*nodes, pool, slots_B, tree, node_states)

    def magnitude(self, case: TreeCase, y_BT: Tensor, states_BT: Tensor) -> float:
        """The largest value, or norm of a row of a state (q and k have norm 1)."""
        rows = [case.pool[case.slots_B].norm(dim=-1), states_BT.norm(dim=-1), case.nodes[2].abs(), y_BT.abs()]
        return max(row.max().item() for row in rows)


MAMBA2 = Mamba2()
GDN = DeltaRule("gdn", gdn.gdn_recurrent, gdn_tree.gdn_tree, gdn_tree.gdn_fold, gdn_tree.gdn_tree_states, False)
KDA = DeltaRule("kda", kda.kda_recurrent, kda_tree.kda_tree, kda_tree.kda_fold, kda_tree.kda_tree_states, True)
OPS = [MAMBA2, GDN, KDA]


def make_case(
    op: Mamba2 | DeltaRule,
    parents: Sequence[Parents],
    *,
    dims: Dims = Dims(),
    decay: float | Tensor = 1.0,
    is_padding: Sequence[bool] = (),
    seed: int = 0,
) -> TreeCase:
    """float64. Most decays `-log a` are mild and some reach `decay`; a tensor `[B, T, H, K]` gives all of them."""
    generator = torch.Generator().manual_seed(seed)
    batch = (len(parents), len(parents[0]))
    num_heads = dims.groups * dims.copies
    if not isinstance(decay, Tensor):
        decay = decay * torch.rand(*batch, num_heads, dims.key, generator=generator, dtype=torch.float64) ** 6
    nodes, shared = op.make(batch, dims, decay, generator)
    num_slots = 2 * len(parents) + 1
    slots_B = torch.randperm(num_slots, generator=generator)[: len(parents)] + 1
    slots_B[: len(is_padding)].masked_fill_(torch.tensor(is_padding, dtype=torch.bool), 0)
    pool = torch.full((num_slots + 1, num_heads, dims.value, dims.key), math.nan, dtype=torch.float64)
    pool[0] = 0.25
    live_B = slots_B[slots_B > 0]
    pool[live_B] = torch.randn(len(live_B), *pool.shape[1:], generator=generator, dtype=torch.float64)
    return TreeCase(op, parents, build_tree(parents), nodes, shared, pool, slots_B)

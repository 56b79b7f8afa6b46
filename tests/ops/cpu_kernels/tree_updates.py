"""The recurrent ops of `tests/ops/recurrent_trees.py` with kernels in place of the PyTorch forms; what these may err.

Shapes: B rows, T nodes of a tree, G groups or key heads, H heads; a state's dims are P, N (Mamba-2) or V, K.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybrid_runtime.ops.cpu_kernels import tree_twins
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree
from tests.ops.recurrent_trees import GDN, KDA, MAMBA2, DeltaRule, Dims, Mamba2, Nodes, TreeCase, make_case
from tests.ops.tree_cases import large_parents


class Mamba2Twin(Mamba2):
    def verify(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B: Tensor, tree: DraftTree):
        (x, dt, b, c), (a,) = nodes, shared
        return tree_twins.mamba2_tree(x, dt, a, b, c, pool, slots_B, tree), None

    def fold(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B, destinations_B, u: Tensor | None, path) -> None:
        (x, dt, b, _), (a,) = nodes, shared
        tree_twins.mamba2_fold(pool, slots_B, destinations_B, dt, a, x, b, path)

    def tree_states(self, nodes: Nodes, shared: Nodes, pool: Tensor, slots_B, tree, node_states) -> Tensor:
        (x, dt, b, c), (a,) = nodes, shared
        return tree_twins.mamba2_tree_states(x, dt, a, b, c, pool, slots_B, tree, node_states)


def delta_twin(op: DeltaRule) -> DeltaRule:
    forms = {name: getattr(tree_twins, f"{op.name}_{name}") for name in ("tree", "fold", "tree_states")}
    return replace(op, tree_form=forms["tree"], fold_form=forms["fold"], states_form=forms["tree_states"])


TWINS: dict[Mamba2 | DeltaRule, Mamba2 | DeltaRule] = {
    MAMBA2: Mamba2Twin(),
    GDN: delta_twin(GDN),
    KDA: delta_twin(KDA),
}
OPS = list(TWINS)

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PADDING_ROW = 1
NUM_ROWS = 3


def case_of(
    op: Mamba2 | DeltaRule, shape: str, num_nodes: int, dims: Dims, decay: float = 0.3, **options: object
) -> TreeCase:
    """Three rows in float64, of which one is padding."""
    parents = large_parents(shape, NUM_ROWS, num_nodes)
    return make_case(op, parents, dims=dims, decay=decay, is_padding=[False, True], **options)  # type: ignore[arg-type]


def in_kernel(case: TreeCase) -> TreeCase:
    return replace(case, op=TWINS[case.op])


def fold_into(case: TreeCase, u_BT: Tensor | None, destinations_B: Tensor, path: AcceptedPath) -> Tensor:
    """The pool after a fold, of which the case's is left as it is."""
    pool = case.pool.clone()
    replace(case, pool=pool).fold(u_BT, destinations_B, path)
    return pool


def live(x_BT: Tensor) -> Tensor:
    """Without the padding row."""
    return torch.cat([x_BT[:PADDING_ROW], x_BT[PADDING_ROW + 1 :]])


def magnitudes(case: TreeCase) -> tuple[Tensor, Tensor, Tensor]:
    """What the terms of outputs, of u and of the states of a float64 case add up to in absolute value."""
    if isinstance(case.op, Mamba2):
        x, dt, b, c = case.nodes
        sizes = replace(case, nodes=(x.abs(), dt, b.abs(), c.abs()), pool=case.pool.abs()).expected()
        return sizes[0], sizes[0], sizes[1]
    q, k, v, log_a, beta = case.nodes
    q, k = (x.abs().repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    _, u_BTHV = case.verify()
    assert u_BTHV is not None
    kept_BTHK = log_a.exp() if case.op is KDA else log_a.exp()[..., None]
    sizes_BHVK: list[Tensor] = []
    answers_BHV: list[Tensor] = []
    for node in range(v.shape[1]):
        rows = (torch.arange(len(v)), case.tree.parents_BT[:, node])
        above_BHVK = torch.stack(sizes_BHVK, dim=1)[rows] if node else case.pool[case.slots_B].abs()
        kept_BHVK = kept_BTHK[:, node, :, None] * above_BHVK
        answers_BHV.append((kept_BHVK @ k[:, node, ..., None]).squeeze(-1))
        sizes_BHVK.append(kept_BHVK + u_BTHV[:, node, ..., None].abs() * k[:, node, :, None])
    states_BTHVK = torch.stack(sizes_BHVK, dim=1)
    u_sizes_BTHV = beta[..., None] * (v.abs() + torch.stack(answers_BHV, dim=1))
    return (states_BTHVK @ q[..., None]).squeeze(-1), u_sizes_BTHV, states_BTHVK

"""What the gated delta rules share over a draft tree: the solve, the fold of a path, and the walk from node to node.

`u` of a node depends on its ancestors alone: those that verify computes serve whichever path is accepted.

Shapes: B rows, T nodes of a tree, I a node and J one that it sees, G key heads, H value heads (value head h reads key
head h // (H // G)), K key dim (of a decay: K or 1), V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from torch import Tensor

from hybrid_runtime.ops.delta_rule import advance, per_value_head, sums_after
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, along_path, write_committed
from hybrid_runtime.ops.ragged import state_dtype_for


@dataclass(frozen=True)
class DeltaTreeTerms:
    """What of a tree doesn't depend on the committed state S. With it

        (I + A) U = β ∘ (V - k_in Sᵀ);   Y = q_in Sᵀ + scores U

    All tensors share the dtype of state arithmetic.
    """

    system_BHIJ: Tensor  # A_ij = β_i <k_i, k_j> decayed from j to i for ancestors j of i; the diagonal is not read
    scores_BHIJ: Tensor  # <q_i, k_j> decayed from j to i for i and its ancestors j
    q_in_BHTK: Tensor  # q decayed from the committed state on
    k_in_BHTK: Tensor  # k decayed from the committed state on
    v_BHTV: Tensor
    beta_BHT1: Tensor


def node_heads(x_BTX: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, G or H, X]` to `[B, H, T, X]` in `dtype`."""
    return rearrange(per_value_head(x_BTX.to(dtype), num_heads), "b t h x -> b h t x")


def solve_tree(terms: DeltaTreeTerms, s0_BHVK: Tensor, fault_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and u of all nodes, `[B, T, H, V]` each, plus `fault_BT`. A parent's index is below its node's: A is
    strictly lower triangular, and one triangular solve serves a chain as well as a bush."""
    read_BHTV = einsum(terms.k_in_BHTK, s0_BHVK, "b h t k, b h v k -> b h t v")
    target_BHTV = terms.beta_BHT1 * (terms.v_BHTV - read_BHTV)
    u_BHTV = torch.linalg.solve_triangular(terms.system_BHIJ, target_BHTV, upper=False, unitriangular=True)
    y_BHTV = einsum(terms.q_in_BHTK, s0_BHVK, "b h t k, b h v k -> b h t v") + terms.scores_BHIJ @ u_BHTV
    fault_BT11 = fault_BT[..., None, None]
    return (
        rearrange(y_BHTV, "b h t v -> b t h v") + fault_BT11,
        rearrange(u_BHTV, "b h t v -> b t h v") + fault_BT11,
    )


def delta_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    k_BTGK: Tensor,
    u_BTHV: Tensor,
    log_a_BTHK: Tensor,
    path: AcceptedPath,
) -> None:
    """Writes `e^{G_a} ∘ S + Σ_j u_j (e^{G_a - G_j} ∘ k_j)ᵀ` over the path's nodes j up to a, its last; G sums `log_a`.

    S is `state_pool[slots_B]`. A destination may be its row's own slot; those other than 0 must be distinct, and no
    other row's slot. Rows without accepted nodes or with destination 0 change nothing. What rejected nodes hold is not
    read.
    """
    dtype = state_dtype_for(state_pool, k_BTGK, u_BTHV, log_a_BTHK)
    k_BTGK, u_BTHV, log_a_BTHK = (along_path(x_BT, path).to(dtype) for x_BT in (k_BTGK, u_BTHV, log_a_BTHK))
    log_a_BHTK = rearrange(log_a_BTHK, "b t h k -> b h t k")
    k_out_BHTK = sums_after(log_a_BHTK).exp() * node_heads(k_BTGK, u_BTHV.shape[2], dtype)
    kept_BH1K = log_a_BHTK.sum(dim=2, keepdim=True).exp()
    added_BHVK = einsum(u_BTHV, k_out_BHTK, "b t h v, b h t k -> b h v k")
    write_committed(state_pool, destinations_B, kept_BH1K * state_pool[slots_B].to(dtype) + added_BHVK, path)


def delta_tree_states(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTHK: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
    node_states: Tensor,
) -> Tensor:
    """Outputs `[B, T, H, V]` node by node; writes the state behind every node to `node_states`,
    `[B, T, H, V, K]` or more rows or nodes.

    A node steps from its parent's state, the root from `state_pool[slots_B]`, which is not written. T dependent steps.
    """
    dtype = state_dtype_for(q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH, state_pool)
    num_heads = v_BTHV.shape[2]
    q_BTHK, k_BTHK = (per_value_head(x_BTGK.to(dtype), num_heads) for x_BTGK in (q_BTGK, k_BTGK))
    operands_BT = (q_BTHK, k_BTHK, v_BTHV.to(dtype), log_a_BTHK.to(dtype), beta_BTH.to(dtype))
    row_B = torch.arange(v_BTHV.shape[0], device=v_BTHV.device)
    ys_BHV = []
    for node in range(v_BTHV.shape[1]):
        before_BHVK = state_pool[slots_B] if node == 0 else node_states[row_B, tree.parents_BT[:, node]]
        s_BHVK, y_BHV = advance(before_BHVK.to(dtype), *(x_BT[:, node] for x_BT in operands_BT))
        node_states.index_put_((row_B, torch.full_like(row_B, node)), s_BHVK.to(node_states.dtype))
        ys_BHV.append(y_BHV)
    return torch.stack(ys_BHV, dim=1).to(v_BTHV.dtype)

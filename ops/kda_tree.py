"""Kimi delta attention over a draft tree: outputs of all nodes from the committed state, and that moved along a path.

Shapes: B rows, T nodes of a tree, I nodes of a block, J nodes that they may see, M nodes between the two, G key heads,
H value heads (value head h reads key head h // (H // G)), K key dim, V value dim, X the pair (k, q). Operands are as in
`ops/kda.py`.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from hybrid_runtime.ops.delta_tree import DeltaTreeTerms, delta_fold, delta_tree_states, node_heads, solve_tree
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, contain_faults, strict_ancestors
from hybrid_runtime.ops.ragged import state_dtype_for

NODE_BLOCK = 8  # nodes whose decays from all their ancestors, B * H * T * K numbers each, are in memory at once


def kda_tree(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTHK: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
) -> tuple[Tensor, Tensor]:
    """Of each node, what steps from `state_pool[slots_B]` along its path yield. Nothing is written.

    Returns outputs in v's dtype and the nodes' u in the dtype of state arithmetic, `[B, T, H, V]` each.
    """
    dtype = state_dtype_for(q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH, state_pool)
    sound_BT, fault_BT = contain_faults(tree.ancestors_BTT, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH[..., None])
    q_BHTK, k_BHTK, v_BHTV, log_a_BHTK, beta_BHT1 = (
        node_heads(x_BTHX, v_BTHV.shape[2], dtype) for x_BTHX in (q_BTGK, *sound_BT)
    )
    scores_kk_BHIJ, scores_qk_BHIJ = decayed_tree_scores(k_BHTK, q_BHTK, log_a_BHTK, tree)
    decay_BHTK = (tree.ancestors_BTT[:, None].to(dtype) @ log_a_BHTK).exp()
    terms = DeltaTreeTerms(
        system_BHIJ=beta_BHT1 * scores_kk_BHIJ,
        scores_BHIJ=scores_qk_BHIJ,
        q_in_BHTK=decay_BHTK * q_BHTK,
        k_in_BHTK=decay_BHTK * k_BHTK,
        v_BHTV=v_BHTV,
        beta_BHT1=beta_BHT1,
    )
    y_BTHV, u_BTHV = solve_tree(terms, state_pool[slots_B].to(dtype), fault_BT)
    return y_BTHV.to(v_BTHV.dtype), u_BTHV


def decayed_tree_scores(k_BHTK: Tensor, q_BHTK: Tensor, log_a_BHTK: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor]:
    """Σ_c x_ic k_jc e^(sum of log_a_c from behind j to i) for x = k and x = q: two `[B, H, T, T]`, 0 where j is neither
    i nor an ancestor of i.

    A decay that differs per channel does not leave the product over channels, and on a tree the paths of a block of
    nodes have no one node in common at which it could be split: every pair has its own exponentials. Their exponents
    are sums of their own entries, made as a product with the mask of the nodes between the two.
    """
    num_nodes = k_BHTK.shape[2]
    below_BTT = strict_ancestors(tree)
    kq_BHTKX = torch.stack([k_BHTK, q_BHTK], dim=-1)
    rows_BHIJX = []
    for begin in range(0, num_nodes, NODE_BLOCK):
        end = min(begin + NODE_BLOCK, num_nodes)
        sees_BIJ = tree.ancestors_BTT[:, begin:end, :end]
        is_between_BIJM = sees_BIJ[:, :, None] & below_BTT.mT[:, None, :end, :end]
        is_between_BPM = rearrange(is_between_BIJM, "b i j m -> b 1 (i j) m").to(k_BHTK.dtype)
        sums_BHIJK = rearrange(is_between_BPM @ log_a_BHTK[:, :, :end], "b h (i j) k -> b h i j k", j=end)
        reach_BHIJK = sums_BHIJK.exp() * k_BHTK[:, :, None, :end]
        row_BHIJX = (reach_BHIJK @ kq_BHTKX[:, :, begin:end]).masked_fill(~sees_BIJ[:, None, ..., None], 0)
        rows_BHIJX.append(torch.nn.functional.pad(row_BHIJX, (0, 0, 0, num_nodes - end)))
    scores_kk_BHIJ, scores_qk_BHIJ = torch.cat(rows_BHIJX, dim=2).unbind(-1)
    return scores_kk_BHIJ, scores_qk_BHIJ


def kda_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    k_BTGK: Tensor,
    u_BTHV: Tensor,
    log_a_BTHK: Tensor,
    path: AcceptedPath,
) -> None:
    """Writes the state behind the last node of `path`, from `state_pool[slots_B]`, to `state_pool[destinations_B]`.

    A destination may be its row's own slot; those other than 0 must be distinct, and no other row's slot. Rows without
    accepted nodes or with destination 0 change nothing. What rejected nodes hold is not read.
    """
    delta_fold(state_pool, slots_B, destinations_B, k_BTGK, u_BTHV, log_a_BTHK, path)


def kda_tree_states(
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
    """The outputs of `kda_tree`, node by node; writes the state behind every node to `node_states`,
    `[B, T, H, V, K]` or more rows or nodes.

    A node steps from its parent's state, the root from `state_pool[slots_B]`, which is not written. T dependent steps.
    """
    operands_BT = (q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH)
    return delta_tree_states(*operands_BT, state_pool, slots_B, tree, node_states)

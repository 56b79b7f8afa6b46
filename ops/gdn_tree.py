"""Gated DeltaNet over a draft tree: outputs of all nodes from the committed state, and that state moved along a path.

Shapes: B rows, T nodes of a tree, I a node and J one that it sees, G key heads, H value heads (value head h reads key
head h // (H // G)), K key dim, V value dim. Operands are as in `ops/gdn.py`.
"""

from __future__ import annotations

from einops import repeat
from torch import Tensor

from hybrid_runtime.ops.delta_tree import DeltaTreeTerms, delta_fold, delta_tree_states, node_heads, solve_tree
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, contain_faults, path_decays
from hybrid_runtime.ops.ragged import state_dtype_for


def gdn_tree(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
) -> tuple[Tensor, Tensor]:
    """Of each node, what steps from `state_pool[slots_B]` along its path yield. Nothing is written.

    Returns outputs in v's dtype and the nodes' u in the dtype of state arithmetic, `[B, T, H, V]` each.
    """
    dtype = state_dtype_for(q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool)
    num_key_heads, num_heads = k_BTGK.shape[2], v_BTHV.shape[2]
    spreading_BT = (k_BTGK, v_BTHV, log_a_BTH[..., None], beta_BTH[..., None])
    (k_BTGK, *sound_BT), fault_BT = contain_faults(tree.ancestors_BTT, *spreading_BT)
    q_BGTK, k_BGTK = (node_heads(x_BTGK, num_key_heads, dtype) for x_BTGK in (q_BTGK, k_BTGK))
    v_BHTV, log_a_BHT1, beta_BHT1 = (node_heads(x_BTHX, num_heads, dtype) for x_BTHX in sound_BT)

    def per_head(x_BGTX: Tensor) -> Tensor:
        return repeat(x_BGTX, "b g t x -> b (g copies) t x", copies=num_heads // num_key_heads)

    decay_BHT, decay_BHIJ = path_decays(log_a_BHT1[..., 0], tree)
    terms = DeltaTreeTerms(
        system_BHIJ=beta_BHT1 * decay_BHIJ * per_head(k_BGTK @ k_BGTK.mT),
        scores_BHIJ=decay_BHIJ * per_head(q_BGTK @ k_BGTK.mT),
        q_in_BHTK=decay_BHT[..., None] * per_head(q_BGTK),
        k_in_BHTK=decay_BHT[..., None] * per_head(k_BGTK),
        v_BHTV=v_BHTV,
        beta_BHT1=beta_BHT1,
    )
    y_BTHV, u_BTHV = solve_tree(terms, state_pool[slots_B].to(dtype), fault_BT)
    return y_BTHV.to(v_BTHV.dtype), u_BTHV


def gdn_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    k_BTGK: Tensor,
    u_BTHV: Tensor,
    log_a_BTH: Tensor,
    path: AcceptedPath,
) -> None:
    """Writes the state behind the last node of `path`, from `state_pool[slots_B]`, to `state_pool[destinations_B]`.

    A destination may be its row's own slot; those other than 0 must be distinct, and no other row's slot. Rows without
    accepted nodes or with destination 0 change nothing. What rejected nodes hold is not read.
    """
    delta_fold(state_pool, slots_B, destinations_B, k_BTGK, u_BTHV, log_a_BTH[..., None], path)


def gdn_tree_states(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
    node_states: Tensor,
) -> Tensor:
    """The outputs of `gdn_tree`, node by node; writes the state behind every node to `node_states`,
    `[B, T, H, V, K]` or more rows or nodes.

    A node steps from its parent's state, the root from `state_pool[slots_B]`, which is not written. T dependent steps.
    """
    operands_BT = (q_BTGK, k_BTGK, v_BTHV, log_a_BTH[..., None], beta_BTH)
    return delta_tree_states(*operands_BT, state_pool, slots_B, tree, node_states)

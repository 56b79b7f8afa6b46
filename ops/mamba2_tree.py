"""Mamba-2 over a draft tree: outputs of all nodes from the committed state, and that state moved along a path.

Shapes: B rows, T nodes of a tree, I a node and J one that it sees, H heads, G groups, K heads of a group (head h uses
group h // K), P head dim, N state dim. Operands are as in `ops/mamba2.py`.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from hybrid_runtime.ops.delta_rule import sums_after
from hybrid_runtime.ops.draft_tree import (
    AcceptedPath,
    DraftTree,
    along_path,
    contain_faults,
    path_decays,
    write_committed,
)
from hybrid_runtime.ops.ragged import state_dtype_for


def mamba2_tree(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
) -> Tensor:
    """Outputs `[B, T, H, P]` in x's dtype: of each node, what steps from `state_pool[slots_B]` along its path yield.

    Nothing is written. With `l` the sums of `dt a` along paths and M the mask of the nodes that a node sees:
    `Y = e^l ∘ (C h0ᵀ) + (M ∘ e^{l_i - l_j} ∘ C Bᵀ)(dt ∘ X)`. O(T² H) memory for the decays.
    """
    dtype = state_dtype_for(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, state_pool)
    num_groups = b_BTGN.shape[2]
    (x_BTHP_, dt_BTH, b_BTGN), fault_BT = contain_faults(tree.ancestors_BTT, x_BTHP, dt_BTH, b_BTGN)
    dt_BTH = dt_BTH.to(dtype)
    decay_BHT, decay_BHIJ = path_decays(rearrange(dt_BTH * a_H.to(dtype), "b t h -> b h t"), tree)
    decay_BGKIJ = rearrange(decay_BHIJ, "b (g k) i j -> b g k i j", g=num_groups)
    dtx_BGKTP = rearrange(dt_BTH[..., None] * x_BTHP_.to(dtype), "b t (g k) p -> b g k t p", g=num_groups)
    b_BGTN, c_BGTN = (rearrange(x_BTGN.to(dtype), "b t g n -> b g t n") for x_BTGN in (b_BTGN, c_BTGN))
    score_BGIJ = c_BGTN @ b_BGTN.mT
    h0_BGKPN = rearrange(state_pool[slots_B].to(dtype), "b (g k) p n -> b g k p n", g=num_groups)
    from_state_BGKTP = einsum(c_BGTN, h0_BGKPN, "b g t n, b g k p n -> b g k t p")
    decay_BGKT = rearrange(decay_BHT, "b (g k) t -> b g k t", g=num_groups)
    y_BGKTP = decay_BGKT[..., None] * from_state_BGKTP + (decay_BGKIJ * score_BGIJ[:, :, None]) @ dtx_BGKTP
    y_BTHP = rearrange(y_BGKTP, "b g k t p -> b t (g k) p") + fault_BT[:, :, None, None]
    return y_BTHP.to(x_BTHP.dtype)


def mamba2_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    x_BTHP: Tensor,
    b_BTGN: Tensor,
    path: AcceptedPath,
) -> None:
    """Writes the state behind the last node of `path`, from `state_pool[slots_B]`, to `state_pool[destinations_B]`.

    A destination may be its row's own slot; those other than 0 must be distinct, and no other row's slot. Rows without
    accepted nodes or with destination 0 change nothing. What rejected nodes hold is not read.
    """
    dtype = state_dtype_for(dt_BTH, a_H, x_BTHP, b_BTGN, state_pool)
    num_groups = b_BTGN.shape[2]
    dt_BTH, x_BTHP, b_BTGN = (along_path(x_BT, path).to(dtype) for x_BT in (dt_BTH, x_BTHP, b_BTGN))
    log_BTH = dt_BTH * a_H.to(dtype)
    to_end_BTH = sums_after(log_BTH).exp()
    dtx_BTGKP = rearrange((to_end_BTH * dt_BTH)[..., None] * x_BTHP, "b t (g k) p -> b t g k p", g=num_groups)
    added_BGKPN = einsum(dtx_BTGKP, b_BTGN, "b t g k p, b t g n -> b g k p n")
    kept_BH = log_BTH.sum(dim=1).exp()
    h_BHPN = kept_BH[..., None, None] * state_pool[slots_B].to(dtype)
    h_BHPN = h_BHPN + rearrange(added_BGKPN, "b g k p n -> b (g k) p n")
    write_committed(state_pool, destinations_B, h_BHPN, path)


def mamba2_tree_states(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
    node_states: Tensor,
) -> Tensor:
    """`mamba2_tree` node by node: also writes the state behind every node to `node_states`,
    `[B, T, H, P, N]` or more rows or nodes.

    A node steps from its parent's state, the root from `state_pool[slots_B]`, which is not written. T dependent steps.
    """
    dtype = state_dtype_for(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, state_pool)
    heads_per_group = x_BTHP.shape[2] // b_BTGN.shape[2]
    b_BTHN, c_BTHN = (x_BTGN.to(dtype).repeat_interleave(heads_per_group, dim=2) for x_BTGN in (b_BTGN, c_BTGN))
    dt_BTH, dtx_BTHP = dt_BTH.to(dtype), dt_BTH.to(dtype)[..., None] * x_BTHP.to(dtype)
    kept_BTH = (dt_BTH * a_H.to(dtype)).exp()
    row_B = torch.arange(x_BTHP.shape[0], device=x_BTHP.device)
    ys_BHP = []
    for node in range(x_BTHP.shape[1]):
        before_BHPN = state_pool[slots_B] if node == 0 else node_states[row_B, tree.parents_BT[:, node]]
        added_BHPN = dtx_BTHP[:, node, :, :, None] * b_BTHN[:, node, :, None, :]
        h_BHPN = kept_BTH[:, node, :, None, None] * before_BHPN.to(dtype) + added_BHPN
        node_states.index_put_((row_B, torch.full_like(row_B, node)), h_BHPN.to(node_states.dtype))
        ys_BHP.append(einsum(h_BHPN, c_BTHN[:, node], "b h p n, b h n -> b h p"))
    return torch.stack(ys_BHP, dim=1).to(x_BTHP.dtype)

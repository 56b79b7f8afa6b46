"""Attention of a draft tree's nodes over the committed context and their ancestors: grouped-query and latent (MLA).

Node i stands at position committed length + depth(i). It sees the committed context `req_to_token[row, :committed_len]`
and, at `kv_slots_BT[j]`, itself and its ancestors j; slots of all nodes are written before. Slot 0, which must be
finite, stands in for what no node of a row sees and serves filler nodes and padding rows.

Shapes: B rows, T nodes of a tree, C positions of the context, S = C + T places that a node may see, H query heads,
G key-value heads, K query heads of a key-value head (head h reads key-value head h // K), D key head dim, V value head
dim; latent attention: R latent dim, E rotary dim, R + E together L.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from hybrid_runtime.ops.draft_tree import DraftTree, contain_faults
from hybrid_runtime.ops.ragged import state_dtype_for


def tree_attention(
    q_BTHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    kv_slots_BT: Tensor,
    tree: DraftTree,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Outputs `[B, T, H, V]` of all nodes in the dtype of the queries.

    `k_pool` `[slots + 1, G, D]` and `v_pool` `[slots + 1, G, V]` as for `ops.attention.decode_attention`; lengths are
    int64, 0 for padding rows. `max_context_len` bounds every committed length and sets the shapes. A node sees the last
    `window` positions, its own included, if given. Mutates nothing.
    """
    dtype = state_dtype_for(q_BTHD)
    table = (req_to_token, request_rows_B, committed_lens_B, max_context_len)
    visible_BTS, slots_BS = _visible_places(*table, kv_slots_BT, tree, window)
    q_BTGKD = rearrange(q_BTHD.to(dtype), "b t (g k) d -> b t g k d", g=k_pool.shape[1])
    (v_BSGV,), fault_BT = contain_faults(visible_BTS, v_pool[slots_BS].to(dtype))
    score_BGKTS = einsum(q_BTGKD, k_pool[slots_BS].to(dtype), "b t g k d, b s g d -> b g k t s") * scale
    weight_BGKTS = score_BGKTS.masked_fill(~visible_BTS[:, None, None], -torch.inf).softmax(-1)
    o_BTGKV = einsum(weight_BGKTS, v_BSGV, "b g k t s, b s g v -> b t g k v")
    o_BTHV = rearrange(o_BTGKV, "b t g k v -> b t (g k) v") + fault_BT[..., None, None]
    return o_BTHV.to(q_BTHD.dtype)


def tree_mla(
    q_nope_BTHD: Tensor,
    q_rope_BTHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    kv_slots_BT: Tensor,
    tree: DraftTree,
    *,
    scale: float,
) -> Tensor:
    """Latent attention, absorbed as in `ops.attention.decode_mla`: outputs `[B, T, H, V]` in the dtype of the queries.

    `latent_pool` `[slots + 1, R + E]`; the other arguments as for `tree_attention`. Mutates nothing.
    """
    latent_dim = w_k_HDR.shape[-1]
    dtype = state_dtype_for(q_nope_BTHD)
    table = (req_to_token, request_rows_B, committed_lens_B, max_context_len)
    visible_BTS, slots_BS = _visible_places(*table, kv_slots_BT, tree, None)
    q_latent_BTHR = einsum(q_nope_BTHD, w_k_HDR, "b t h d, h d r -> b t h r")
    q_BTHL = torch.cat([q_latent_BTHR, q_rope_BTHE], dim=-1).to(dtype)
    key_BSL = latent_pool[slots_BS].to(dtype)
    (latent_BSR,), fault_BT = contain_faults(visible_BTS, key_BSL[..., :latent_dim])
    score_BHTS = einsum(q_BTHL, key_BSL, "b t h l, b s l -> b h t s") * scale
    weight_BHTS = score_BHTS.masked_fill(~visible_BTS[:, None], -torch.inf).softmax(-1)
    o_BTHR = einsum(weight_BHTS, latent_BSR, "b h t s, b s r -> b t h r") + fault_BT[..., None, None]
    return einsum(o_BTHR.to(q_nope_BTHD.dtype), w_v_HVR, "b t h r, h v r -> b t h v")


def _visible_places(
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    kv_slots_BT: Tensor,
    tree: DraftTree,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Which places each node sees, `[B, T, S]`, and the KV slots of a row's places, `[B, S]`: context, then nodes.

    Table entries that no node of a row sees may be stale: slot 0 is read in their place.
    """
    position_C = torch.arange(max_context_len, device=kv_slots_BT.device)
    sees_context_BTC = (position_C < committed_lens_B[:, None, None]).expand(-1, kv_slots_BT.shape[1], -1)
    sees_node_BTT = tree.ancestors_BTT
    if window is not None:
        first_BT1 = (committed_lens_B[:, None] + tree.depths_BT - window + 1)[..., None]
        sees_context_BTC = sees_context_BTC & (position_C >= first_BT1)
        sees_node_BTT = sees_node_BTT & (tree.depths_BT[:, :, None] - tree.depths_BT[:, None, :] < window)
    # the root's view of the context reaches furthest back
    slots_BC = torch.where(sees_context_BTC[:, 0], req_to_token[:, :max_context_len][request_rows_B], 0)
    return torch.cat([sees_context_BTC, sees_node_BTT], dim=-1), torch.cat([slots_BC, kv_slots_BT], dim=-1)

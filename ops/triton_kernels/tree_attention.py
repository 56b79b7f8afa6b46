"""Attention of draft trees over pool slots; twins of the forms in `ops/tree_attention.py`.

All nodes of a row see its whole committed context: to the kernels of decode attention the nodes' queries are so many
more heads, which read the context together, up to its length and where it lies. What a node sees of its tree, a few
entries, is left to the compiler, and joins the splits of the context where these are combined.

Shapes: B rows, T nodes of a tree, I a node and J one that it sees, H query heads, G key-value heads, K query heads of
a key-value head, D key head dim, V value head dim; latent attention: R latent dim, E rotary dim, C = R + E.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.library import triton_op

from hybrid_runtime.ops import tree_attention as plain
from hybrid_runtime.ops.draft_tree import DraftTree, contain_faults
from hybrid_runtime.ops.ragged import state_dtype_for
from hybrid_runtime.ops.triton_kernels.attention import attend


@triton_op("hybrid_runtime::attend_beside_nodes", mutates_args=())
def attend_beside_nodes(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    node_BHV: Tensor,
    node_log_sum_BH: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """Attention of some queries per row over its committed context (int64 lengths, 0 or more) and over what `node_BHV`
    and `node_log_sum_BH` stand for: outputs and logarithms of sums of exponentials, in state arithmetic."""
    return attend(
        q_BHD,
        k_pool,
        v_pool,
        req_to_token,
        request_rows_B,
        committed_lens_B,
        max_context_len,
        scale=scale,
        window=None,
        extra_dim=0,
        nodes=(node_BHV.contiguous(), node_log_sum_BH.contiguous()),
    )


@triton_op("hybrid_runtime::attend_latents_beside_nodes", mutates_args=())
def attend_latents_beside_nodes(
    q_BHC: Tensor,
    latent_pool: Tensor,
    node_BHR: Tensor,
    node_log_sum_BH: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """As `attend_beside_nodes`, over one latent per token: the weighted sums of latents `[B, H, R]`."""
    pool_U1C = latent_pool[:, None]
    return attend(
        q_BHC,
        pool_U1C,
        pool_U1C,
        req_to_token,
        request_rows_B,
        committed_lens_B,
        max_context_len,
        scale=scale,
        window=None,
        extra_dim=latent_pool.shape[1] - node_BHR.shape[-1],
        nodes=(node_BHR.contiguous(), node_log_sum_BH.contiguous()),
    )


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
    """Contract of `hybrid_runtime.ops.tree_attention.tree_attention`. With a window, of which nodes of different depth
    see different parts, it is that form, whose copies of keys and values are as long as the longest context."""
    table = (req_to_token, request_rows_B, committed_lens_B, max_context_len)
    if window is not None:
        return plain.tree_attention(q_BTHD, k_pool, v_pool, *table, kv_slots_BT, tree, scale=scale, window=window)
    dtype = state_dtype_for(q_BTHD)
    q_BIGKD = rearrange(q_BTHD, "b i (g k) d -> b i g k d", g=k_pool.shape[1])
    (v_BJGV,), fault_BI = contain_faults(tree.ancestors_BTT, v_pool[kv_slots_BT].to(dtype))
    k_BJGD = k_pool[kv_slots_BT].to(dtype)
    score_BGIKJ = einsum(q_BIGKD.to(dtype), k_BJGD, "b i g k d, b j g d -> b g i k j") * scale
    score_BGIKJ = score_BGIKJ.masked_fill(~tree.ancestors_BTT[:, None, :, None], -torch.inf)
    node_BGIKV = einsum(score_BGIKJ.softmax(-1), v_BJGV, "b g i k j, b j g v -> b g i k v")
    o_BHV = attend_beside_nodes(
        rearrange(q_BIGKD, "b i g k d -> b (g i k) d"),
        k_pool,
        v_pool,
        rearrange(node_BGIKV, "b g i k v -> b (g i k) v"),
        rearrange(score_BGIKJ.logsumexp(-1), "b g i k -> b (g i k)"),
        *table,
        scale=scale,
    )
    o_BTHV = rearrange(o_BHV, "b (g i k) v -> b i (g k) v", g=k_pool.shape[1], i=q_BTHD.shape[1])
    return o_BTHV + fault_BI[..., None, None].to(o_BTHV.dtype)


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
    """Contract of `hybrid_runtime.ops.tree_attention.tree_mla`."""
    dtype = state_dtype_for(q_nope_BTHD)
    q_latent_BIHR = einsum(q_nope_BTHD, w_k_HDR, "b i h d, h d r -> b i h r")
    q_BIHC = torch.cat([q_latent_BIHR, q_rope_BTHE], dim=-1)
    key_BJC = latent_pool[kv_slots_BT].to(dtype)
    (latent_BJR,), fault_BI = contain_faults(tree.ancestors_BTT, key_BJC[..., : w_k_HDR.shape[-1]])
    score_BIHJ = einsum(q_BIHC.to(dtype), key_BJC, "b i h c, b j c -> b i h j") * scale
    score_BIHJ = score_BIHJ.masked_fill(~tree.ancestors_BTT[:, :, None], -torch.inf)
    node_BIHR = einsum(score_BIHJ.softmax(-1), latent_BJR, "b i h j, b j r -> b i h r")
    o_BHR = attend_latents_beside_nodes(
        rearrange(q_BIHC, "b i h c -> b (i h) c"),
        latent_pool,
        rearrange(node_BIHR, "b i h r -> b (i h) r"),
        rearrange(score_BIHJ.logsumexp(-1), "b i h -> b (i h)"),
        req_to_token,
        request_rows_B,
        committed_lens_B,
        max_context_len,
        scale=scale,
    )
    o_BIHR = rearrange(o_BHR, "b (i h) r -> b i h r", i=q_BIHC.shape[1])
    return einsum(o_BIHR + fault_BI[..., None, None].to(o_BIHR.dtype), w_v_HVR, "b i h r, h v r -> b i h v")

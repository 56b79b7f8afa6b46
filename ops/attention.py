"""Causal attention over keys and values that lie in pool slots: grouped-query attention and latent attention (MLA).

Shapes: L flat tokens of a prefill, S sequences, B rows of a decode, H query heads, G key-value heads, K query heads of
a key-value head (head h reads key-value head h // K), D key head dim, V value head dim, T context length, Q queries of
a block; latent attention: R latent dim, E rotary dim shared by all heads (may be 0), C = R + E.

A pool is `[slots + 1, ...]` of any float dtype, cast on read; the slot of position t of a request is
`req_to_token[row, t]`. Only the slots of visible positions are read, and slot 0, which must be finite. Softmax is
float32, or float64 for float64 queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for

QUERY_BLOCK = 128  # queries that share one mask; bounds the memory of backends that materialise the scores


def attention_reference(
    q_LHD: Tensor, k_TGD: Tensor, v_TGV: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """One sequence, query by query: the definition that every other form is tested against.

    The L queries belong to the last L of the T positions. Position p sees the positions up to p, the last `window` of
    them (itself included) if given. Returns `[L, H, V]` of the dtype of the queries.
    """
    dtype = state_dtype_for(q_LHD)
    num_tokens, num_heads, _ = q_LHD.shape
    heads_per_group = num_heads // k_TGD.shape[1]
    o_LHV = q_LHD.new_zeros(num_tokens, num_heads, v_TGV.shape[-1])
    for token in range(num_tokens):
        end = k_TGD.shape[0] - num_tokens + token + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(num_heads):
            group = head // heads_per_group
            score_T = k_TGD[begin:end, group].to(dtype) @ q_LHD[token, head].to(dtype) * scale
            o_LHV[token, head] = (score_T.softmax(0) @ v_TGV[begin:end, group].to(dtype)).to(q_LHD.dtype)
    return o_LHV


def prefill_attention(
    q_LHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    layout: RaggedLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of a ragged prefill: the queries of sequence s are the last `layout.lengths[s]` of its context
    of `context_lens_S[s]` tokens (int64, on the host).

    `k_pool` `[slots + 1, G, D]` and `v_pool` `[slots + 1, G, V]` already hold the new tokens. Returns `[L, H, V]`, zero
    for padding tokens. Copies one sequence's keys and values at a time; O(L T) work.
    """
    o_LHV = q_LHD.new_zeros(layout.num_tokens, q_LHD.shape[1], v_pool.shape[-1])
    for own, slots_T in _sequences(req_to_token, request_rows_S, context_lens_S, layout, window):
        k_TGD, v_TGV = k_pool[slots_T].to(q_LHD.dtype), v_pool[slots_T].to(q_LHD.dtype)
        o_LHV[own] = _attend_sequence(q_LHD[own], k_TGD, v_TGV, scale=scale, window=window)
    return o_LHV


def decode_attention(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token per row, the last of a context of `context_lens_B` (int64, at least 1) tokens.

    Pools as for `prefill_attention`. `max_context_len` bounds every context and sets the shapes. Returns `[B, H, V]`.
    """
    dtype = state_dtype_for(q_BHD)
    visible_BT, slots_BT = _visible_slots(req_to_token, request_rows_B, context_lens_B, max_context_len, window)
    q_BGKD = rearrange(q_BHD.to(dtype), "b (g k) d -> b g k d", g=k_pool.shape[1])
    k_BTGD = k_pool[slots_BT].to(dtype)
    v_BTGV = v_pool[slots_BT].to(dtype)
    score_BGKT = einsum(q_BGKD, k_BTGD, "b g k d, b t g d -> b g k t") * scale
    weight_BGKT = score_BGKT.masked_fill(~visible_BT[:, None, None], -torch.inf).softmax(-1)
    o_BGKV = einsum(weight_BGKT, v_BTGV, "b g k t, b t g v -> b g k v")
    return rearrange(o_BGKV, "b g k v -> b (g k) v").to(q_BHD.dtype)


def prefill_mla(
    q_nope_LHD: Tensor,
    q_rope_LHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    layout: RaggedLayout,
    *,
    scale: float,
) -> Tensor:
    """Latent attention (DeepSeek-V2) of a ragged prefill, with each sequence's keys and values expanded.

    `latent_pool` `[slots + 1, R + E]` holds per token the normalised latent and then the rotated key channels that all
    heads share. Head h has the key `[w_k[h] latent, rotary]` and the value `w_v[h] latent`. Returns `[L, H, V]`, zero
    for padding tokens.
    """
    latent_dim = w_k_HDR.shape[-1]
    q_LHD = torch.cat([q_nope_LHD, q_rope_LHE], dim=-1)
    o_LHV = q_LHD.new_zeros(layout.num_tokens, q_LHD.shape[1], w_v_HVR.shape[1])
    for own, slots_T in _sequences(req_to_token, request_rows_S, context_lens_S, layout, None):
        latent_TR, rope_TE = latent_pool[slots_T].to(q_LHD.dtype).tensor_split([latent_dim], dim=-1)
        k_nope_THD = einsum(latent_TR, w_k_HDR, "t r, h d r -> t h d")
        k_THD = torch.cat([k_nope_THD, rope_TE[:, None].expand(-1, q_LHD.shape[1], -1)], dim=-1)
        v_THV = einsum(latent_TR, w_v_HVR, "t r, h v r -> t h v")
        o_LHV[own] = _attend_sequence(q_LHD[own], k_THD, v_THV, scale=scale, window=None)
    return o_LHV


def decode_mla(
    q_nope_BHD: Tensor,
    q_rope_BHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """Same attention as `prefill_mla` for one new token per row, absorbed: no key or value is ever expanded.

    `q · (w_k latent) = (w_kᵀ q) · latent`, so that the latent is the one key of all heads; the weighted sum of latents
    goes through `w_v`. Returns `[B, H, V]`.
    """
    q_latent_BHR = einsum(q_nope_BHD, w_k_HDR, "b h d, h d r -> b h r")
    o_BHR = decode_latents(
        torch.cat([q_latent_BHR, q_rope_BHE], dim=-1),
        latent_pool,
        w_k_HDR.shape[-1],
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
    )
    return einsum(o_BHR, w_v_HVR, "b h r, h v r -> b h v")


def decode_latents(
    q_BHC: Tensor,
    latent_pool: Tensor,
    latent_dim: int,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """What absorbed latent attention does between its maps: one latent per token is the key of all heads, and its
    first `latent_dim` channels are their value.

    Contexts as for `decode_attention`. Returns the weighted sums of latents `[B, H, R]` in the dtype of the queries.
    """
    dtype = state_dtype_for(q_BHC)
    visible_BT, slots_BT = _visible_slots(req_to_token, request_rows_B, context_lens_B, max_context_len, None)
    key_BTC = latent_pool[slots_BT].to(dtype)
    score_BHT = einsum(q_BHC.to(dtype), key_BTC, "b h c, b t c -> b h t") * scale
    weight_BHT = score_BHT.masked_fill(~visible_BT[:, None], -torch.inf).softmax(-1)
    return einsum(weight_BHT, key_BTC[..., :latent_dim], "b h t, b t r -> b h r").to(q_BHC.dtype)


def _sequences(
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    layout: RaggedLayout,
    window: int | None,
) -> Iterator[tuple[slice, Tensor]]:
    """For each sequence: where its tokens lie on the flat axis, and the KV slots that any of its queries sees."""
    bounds = zip(layout.starts, layout.lengths, context_lens_S.tolist(), strict=True)
    for sequence, (start, length, end) in enumerate(bounds):
        begin = 0 if window is None else max(0, end - length - window + 1)
        row_1 = request_rows_S[sequence : sequence + 1]
        yield slice(start, start + length), req_to_token[:, begin:end].index_select(0, row_1)[0]


def _attend_sequence(q_LHD: Tensor, k_TGD: Tensor, v_TGV: Tensor, *, scale: float, window: int | None) -> Tensor:
    """`attention_reference` in blocks of queries, each over no more keys than its queries see."""
    num_tokens, first_position = q_LHD.shape[0], k_TGD.shape[0] - q_LHD.shape[0]
    q_HLD, k_GTD, v_GTV = (rearrange(x, "l h d -> 1 h l d") for x in (q_LHD, k_TGD, v_TGV))
    blocks = []
    for block in range(0, num_tokens, QUERY_BLOCK):
        block_end = min(block + QUERY_BLOCK, num_tokens)
        begin = 0 if window is None else max(0, first_position + block - window + 1)
        end = first_position + block_end
        position_Q1 = torch.arange(first_position + block, end, device=q_LHD.device)[:, None]
        key_position_T = torch.arange(begin, end, device=q_LHD.device)
        visible_QT = key_position_T <= position_Q1
        if window is not None:
            visible_QT &= key_position_T > position_Q1 - window
        blocks.append(
            scaled_dot_product_attention(
                q_HLD[:, :, block:block_end],
                k_GTD[:, :, begin:end],
                v_GTV[:, :, begin:end],
                attn_mask=visible_QT,
                scale=scale,
                enable_gqa=True,
            )
        )
    return rearrange(torch.cat(blocks, dim=2), "1 h l v -> l h v")


def _visible_slots(
    req_to_token: Tensor, rows_B: Tensor, context_lens_B: Tensor, max_context_len: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Which positions each row's last token sees, `[B, T]`, and their KV slots; slot 0 for the others.

    Table entries past a row's end may be stale and name slots of other requests or none: they are never read.
    """
    position_T = torch.arange(max_context_len, device=rows_B.device)
    visible_BT = position_T < context_lens_B[:, None]
    if window is not None:
        visible_BT &= position_T >= context_lens_B[:, None] - window
    return visible_BT, torch.where(visible_BT, req_to_token[:, :max_context_len][rows_B], 0)

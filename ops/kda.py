"""Kimi delta attention (KDA): the delta rule whose state decays per key channel (Kimi Linear, arXiv 2510.26692).

Shapes: L flat tokens, S sequences, R requested states, B rows, C chunks, Q tokens of a chunk, N sub-blocks of a chunk,
I tokens of a sub-block, J earlier tokens, G key heads, H value heads (value head h reads key head h // (H // G)),
K key dim, V value dim, X the pair (k, q).
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import pad

from hybrid_runtime.ops.delta_rule import (
    DeltaChunks,
    delta_recurrent,
    delta_step,
    head_chunks,
    scan_chunks,
    sums_after,
    sums_until,
)
from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for

# A chunk of Q tokens costs Q * (I + Q / I) exponentials per key channel, least at I = sqrt(Q).
SUB_BLOCK_SIZE = 8


def kda_recurrent(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LHK: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """Token-by-token definition: S' = a ∘ S; u = β (v - S' k); S = S' + u kᵀ; y = S q.

    q and k are normalised and scaled by the caller; `log_a` <= 0, β in [0, 1]. Returns outputs `[L, H, V]` in v's dtype
    and the states at the layout's requested positions `[R, H, V, K]` in the dtype of state arithmetic. Padding tokens
    yield 0.
    """
    return delta_recurrent(q_LGK, k_LGK, v_LHV, log_a_LHK, beta_LH, s0_SHVK, layout)


def kda_chunked(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LHK: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """`kda_recurrent` in one pass over the layout's chunks; same arguments and result. Mutates nothing; differentiable.

    Decays enter as exponentials of sums of `log_a` along a path, each <= 1, so that no decay is too strong.
    """
    dtype = state_dtype_for(q_LGK, k_LGK, v_LHV, log_a_LHK, beta_LH, s0_SHVK)
    num_heads = v_LHV.shape[1]
    q_CHQK, k_CHQK, v_CHQV, log_a_CHQK, beta_CHQ1 = (
        head_chunks(x_LHX, layout, num_heads, dtype) for x_LHX in (q_LGK, k_LGK, v_LHV, log_a_LHK, beta_LH[..., None])
    )
    scores_kk_CHQQ, scores_qk_CHQQ = decayed_scores(k_CHQK, q_CHQK, log_a_CHQK)
    from_start_CHQK = sums_until(log_a_CHQK).exp()
    chunks = DeltaChunks(
        system_CHQQ=(beta_CHQ1 * scores_kk_CHQQ).tril(-1),
        scores_CHQQ=scores_qk_CHQQ,
        q_in_CHQK=q_CHQK * from_start_CHQK,
        k_in_CHQK=k_CHQK * from_start_CHQK,
        k_out_CHQK=k_CHQK * sums_after(log_a_CHQK).exp(),
        v_CHQV=v_CHQV,
        beta_CHQ1=beta_CHQ1,
        decay_CHK=from_start_CHQK[:, :, -1],
    )
    y_LHV, states_RHVK = scan_chunks(chunks, s0_SHVK, layout)
    return y_LHV.to(v_LHV.dtype), states_RHVK


def kda_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_a_BHK: Tensor,
    beta_BH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token of each row, in place on `state_pool[slots_B]` (`[slots + 1, H, V, K]`); outputs `[B, H, V]`.

    Rows of slot 0 are padding; they may repeat and leave slot 0 as it is.
    """
    return delta_step(q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH, state_pool, slots_B)


def decayed_scores(k_CHQK: Tensor, q_CHQK: Tensor, log_a_CHQK: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c x_ic k_jc e^(sum of log_a_c over j+1..i) for x = k and x = q: two `[C, H, Q, Q]`, zero where j > i.

    A decay that differs per channel does not leave the product over channels, so a chunk is cut into sub-blocks. Two
    tokens of one sub-block use their own exponentials; for two tokens of different ones the decay factors into that
    from j to the start of i's sub-block and that from there to i, and what remains is a matrix product.
    """
    size = k_CHQK.shape[-2]
    sub_size = min(SUB_BLOCK_SIZE, size)
    fill = -size % sub_size
    k_CHNIK, q_CHNIK, log_a_CHNIK = (
        rearrange(pad(x_CHQK, (0, 0, 0, fill)), "c h (n i) k -> c h n i k", i=sub_size)
        for x_CHQK in (k_CHQK, q_CHQK, log_a_CHQK)
    )
    kq_XCHNIK = torch.stack([k_CHNIK, q_CHNIK])
    scores_XCHQQ = _scores_within(kq_XCHNIK, log_a_CHNIK) + _scores_across(kq_XCHNIK, log_a_CHNIK)
    scores_kk_CHQQ, scores_qk_CHQQ = scores_XCHQQ[..., :size, :size].unbind(0)
    return scores_kk_CHQQ, scores_qk_CHQQ


def _scores_within(kq_XCHNIK: Tensor, log_a_CHNIK: Tensor) -> Tensor:
    """`[X, C, H, Q, Q]`, zero outside the sub-blocks on the diagonal."""
    k_CHNIK = kq_XCHNIK[0]
    sub_size = k_CHNIK.shape[-2]
    path_CHNJK = k_CHNIK[..., :0, :]
    rows_XCHNI = []
    # row by row, so that no tensor has the axes i, j and k at once
    for i in range(sub_size):
        path_CHNJK = pad(path_CHNJK + log_a_CHNIK[..., i, None, :], (0, 0, 0, 1))
        reach_CHNJK = path_CHNJK.exp() * k_CHNIK[..., : i + 1, :]
        row_XCHNJ = einsum(kq_XCHNIK[..., i, :], reach_CHNJK, "x c h n k, c h n j k -> x c h n j")
        rows_XCHNI.append(pad(row_XCHNJ, (0, sub_size - 1 - i)))
    scores_XCHIIN = rearrange(rows_XCHNI, "i x c h n j -> x c h i j n")
    return rearrange(torch.diag_embed(scores_XCHIIN), "x c h i j n m -> x c h (n i) (m j)")


def _scores_across(kq_XCHNIK: Tensor, log_a_CHNIK: Tensor) -> Tensor:
    """`[X, C, H, Q, Q]`, zero but for pairs of which j is in an earlier sub-block than i."""
    num_blocks, sub_size = kq_XCHNIK.shape[-3:-1]
    k_CHQK = kq_XCHNIK[0].flatten(-3, -2)
    until_CHNIK, after_CHNIK = sums_until(log_a_CHNIK), sums_after(log_a_CHNIK)
    kq_in_XCHNIK = kq_XCHNIK * until_CHNIK.exp()
    path_CHJK = k_CHQK[..., :0, :]
    rows_XCHIQ = [kq_XCHNIK.new_zeros(*kq_XCHNIK.shape[:3], sub_size, num_blocks * sub_size)]
    for n in range(1, num_blocks):
        # from behind each earlier token to the start of sub-block n
        path_CHJK = torch.cat([path_CHJK + until_CHNIK[..., n - 1, -1:, :], after_CHNIK[..., n - 1, :, :]], dim=-2)
        k_out_CHJK = k_CHQK[..., : n * sub_size, :] * path_CHJK.exp()
        row_XCHIJ = einsum(kq_in_XCHNIK[..., n, :, :], k_out_CHJK, "x c h i k, c h j k -> x c h i j")
        rows_XCHIQ.append(pad(row_XCHIJ, (0, (num_blocks - n) * sub_size)))
    return rearrange(rows_XCHIQ, "n x c h i q -> x c h (n i) q")

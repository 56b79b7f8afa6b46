"""What the gated delta rules share: the recurrent definition, the scan over chunks, and the one-token step.

The state S `[V, K]` of a head maps keys to values. A token first lets it decay, then moves its answer for k towards v:

    S' = a ∘ S;   u = β (v - S' k);   S = S' + u kᵀ;   y = S q

a is a scalar per head (GDN, K axis of length 1) or a vector over key channels (KDA).

Shapes: L flat tokens, S sequences, R requested states, B rows, C chunks, Q tokens of a chunk, J chunks of the longest
sequence, G key heads, H value heads (value head h reads key head h // (H // G)), K key dim (of a decay: K or 1),
V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for


@dataclass(frozen=True)
class DeltaChunks:
    """The terms of every chunk that don't depend on the state S at its start. With them

        (I + A) U = β ∘ (V - k_in Sᵀ);   Y = q_in Sᵀ + scores U;   S_end = decay ∘ S + Uᵀ k_out

    All tensors share the dtype of state arithmetic.
    """

    system_CHQQ: Tensor  # A_ij = β_i <k_i, k_j> decayed from j to i, strictly lower
    scores_CHQQ: Tensor  # <q_i, k_j> decayed from j to i, lower
    q_in_CHQK: Tensor  # q decayed from the chunk's start
    k_in_CHQK: Tensor  # k decayed from the chunk's start
    k_out_CHQK: Tensor  # k decayed to the chunk's end
    v_CHQV: Tensor
    beta_CHQ1: Tensor
    decay_CHK: Tensor  # decay over the whole chunk


def sums_until(log_a_QK: Tensor) -> Tensor:
    """`[..., Q, K]`: sum of the entries up to each place, itself included."""
    return log_a_QK.cumsum(dim=-2)


def sums_after(log_a_QK: Tensor) -> Tensor:
    """`[..., Q, K]`: sum of the entries behind each place."""
    shifted = pad(log_a_QK[..., 1:, :], (0, 0, 0, 1))
    return shifted.flip(-2).cumsum(dim=-2).flip(-2)


def sums_between(log_a_QK: Tensor) -> Tensor:
    """`[..., Q, K]` to `[..., Q, Q, K]`: at (i, j) the sum of the entries j+1..i, and -inf where j > i.

    Each sum is accumulated on its own. The difference of two prefix sums would carry the rounding of the longer sum,
    which behind a strong decay is as large as the whole exponent.
    """
    size = log_a_QK.shape[-2]
    row_Q11 = torch.arange(size, device=log_a_QK.device)[:, None, None]
    column_Q1 = torch.arange(size, device=log_a_QK.device)[:, None]
    entries_QQK = torch.where(row_Q11 > column_Q1, log_a_QK[..., :, None, :], 0.0)
    return entries_QQK.cumsum(dim=-3).masked_fill(row_Q11 < column_Q1, float("-inf"))


def head_chunks(x_LHX: Tensor, layout: RaggedLayout, num_heads: int, dtype: torch.dtype) -> Tensor:
    """`[L, G or H, X]` to `[C, H, Q, X]` in `dtype`; places without a token are zero."""
    copies = num_heads // x_LHX.shape[1]
    return repeat(layout.to_chunks(x_LHX).to(dtype), "c q g x -> c (g copies) q x", copies=copies)


def scan_chunks(chunks: DeltaChunks, s0_SHVK: Tensor, layout: RaggedLayout) -> tuple[Tensor, Tensor]:
    """Outputs `[L, H, V]` and the layout's requested states `[R, H, V, K]`, both in the dtype of `chunks`.

    J dependent steps, each over all sequences.
    """
    num_chunks = chunks.v_CHQV.shape[0]
    num_states = layout.state_chunk_R.shape[0]
    s_SHVK = s0_SHVK.to(chunks.v_CHQV.dtype)
    # one row more than states are asked for, where the states nobody asked for land; a state asked for twice is kept
    # in one of its rows
    states_RHVK = s_SHVK.new_zeros(num_states + 1, *s_SHVK.shape[1:])
    state_of_chunk_C = layout.state_chunk_R.new_full((num_chunks + 1,), num_states)
    state_of_chunk_C[layout.state_chunk_R] = torch.arange(num_states, device=s_SHVK.device)
    ys_SHQV = []
    for chunk_S in layout.sequence_chunks_SJ.unbind(1):
        # a sequence without a j-th chunk takes any other; it has handed over its last state and output before
        own_S = chunk_S.clamp(max=num_chunks - 1)
        read_SHQV = einsum(chunks.k_in_CHQK[own_S], s_SHVK, "s h q k, s h v k -> s h q v")
        target_SHQV = chunks.beta_CHQ1[own_S] * (chunks.v_CHQV[own_S] - read_SHQV)
        # (I + A)⁻¹, computed ahead for all chunks at once, would err about twice as much
        u_SHQV = torch.linalg.solve_triangular(chunks.system_CHQQ[own_S], target_SHQV, upper=False, unitriangular=True)
        from_state_SHQV = einsum(chunks.q_in_CHQK[own_S], s_SHVK, "s h q k, s h v k -> s h q v")
        ys_SHQV.append(from_state_SHQV + chunks.scores_CHQQ[own_S] @ u_SHQV)
        update_SHVK = einsum(u_SHQV, chunks.k_out_CHQK[own_S], "s h q v, s h q k -> s h v k")
        s_SHVK = chunks.decay_CHK[own_S][:, :, None, :] * s_SHVK + update_SHVK
        states_RHVK.index_put_((state_of_chunk_C[chunk_S],), s_SHVK)
    y_LHV = _outputs_of_tokens(ys_SHQV, chunks, layout)
    return y_LHV, states_RHVK[state_of_chunk_C[layout.state_chunk_R]]


def _outputs_of_tokens(ys_SHQV: list[Tensor], chunks: DeltaChunks, layout: RaggedLayout) -> Tensor:
    """Puts the j-th chunks' outputs of all sequences back on the flat token axis."""
    num_chunks, num_heads, _, value_dim = chunks.v_CHQV.shape
    if not ys_SHQV:
        return chunks.v_CHQV.new_zeros(layout.num_tokens, num_heads, value_dim)
    place_SJ = rearrange(layout.sequence_chunks_SJ, "s j -> (j s)")
    place_of_chunk_C = place_SJ.new_zeros(num_chunks + 1)
    place_of_chunk_C[place_SJ] = torch.arange(place_SJ.shape[0], device=place_SJ.device)
    y_CHQV = torch.cat(ys_SHQV)[place_of_chunk_C[:num_chunks]]
    return layout.from_chunks(rearrange(y_CHQV, "c h q v -> c q h v"))


def delta_recurrent(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LHK: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """Token-by-token definition of the op: outputs `[L, H, V]` in v's dtype, requested states `[R, H, V, K]`.

    States are in the dtype of state arithmetic. Padding tokens yield zeros and change nothing.
    """
    dtype = state_dtype_for(q_LGK, k_LGK, v_LHV, log_a_LHK, beta_LH, s0_SHVK)
    num_heads = v_LHV.shape[1]
    q_LHK, k_LHK = (per_value_head(x_LGK.to(dtype), num_heads) for x_LGK in (q_LGK, k_LGK))
    wanted = list(zip(layout.state_sequence_R.tolist(), layout.state_length_R.tolist(), strict=True))
    ys_HV, states_HVK = [], {}
    for sequence, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        s_HVK = s0_SHVK[sequence].to(dtype)
        for t in range(start, start + length):
            s_HVK, y_HV = advance(
                s_HVK, q_LHK[t], k_LHK[t], v_LHV[t].to(dtype), log_a_LHK[t].to(dtype), beta_LH[t].to(dtype)
            )
            ys_HV.append(y_HV)
            states_HVK[sequence, t - start + 1] = s_HVK
    padding = [v_LHV.new_zeros(v_LHV.shape[1:], dtype=dtype)] * (layout.num_tokens - len(ys_HV))
    y_LHV = torch.stack([*ys_HV, *padding]) if layout.num_tokens else v_LHV
    states = [states_HVK[key] for key in wanted]
    states_RHVK = torch.stack(states) if states else s0_SHVK.new_zeros(0, *s0_SHVK.shape[1:], dtype=dtype)
    return y_LHV.to(v_LHV.dtype), states_RHVK


def delta_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_a_BHK: Tensor,
    beta_BH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token of each row: outputs `[B, H, V]` in v's dtype.

    Writes the states `state_pool[slots_B]` (`[slots + 1, H, V, K]`, slots int64) in place. Rows of the null slot 0 are
    padding, of which there may be several: they read it and leave it as it is.
    """
    dtype = state_dtype_for(q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH, state_pool)
    num_heads = v_BHV.shape[1]
    q_BHK, k_BHK = (per_value_head(x_BGK.to(dtype), num_heads) for x_BGK in (q_BGK, k_BGK))
    # no decay and no update: the null slot stays finite however many padding rows pass over it
    is_padding_B1 = (slots_B == 0)[:, None]
    log_a_BHK = log_a_BHK.to(dtype).masked_fill(is_padding_B1[..., None], 0.0)
    beta_BH = beta_BH.to(dtype).masked_fill(is_padding_B1, 0.0)
    s_BHVK, y_BHV = advance(state_pool[slots_B].to(dtype), q_BHK, k_BHK, v_BHV.to(dtype), log_a_BHK, beta_BH)
    state_pool.index_put_((slots_B,), s_BHVK.to(state_pool.dtype))
    return y_BHV.to(v_BHV.dtype)


def advance(
    s_HVK: Tensor, q_HK: Tensor, k_HK: Tensor, v_HV: Tensor, log_a_HK: Tensor, beta_H: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after one token, and the token's output. Leading axes broadcast."""
    decayed_HVK = log_a_HK.exp()[..., None, :] * s_HVK
    u_HV = beta_H[..., None] * (v_HV - einsum(decayed_HVK, k_HK, "... h v k, ... h k -> ... h v"))
    s_HVK = decayed_HVK + u_HV[..., :, None] * k_HK[..., None, :]
    return s_HVK, einsum(s_HVK, q_HK, "... h v k, ... h k -> ... h v")


def per_value_head(x_GK: Tensor, num_heads: int) -> Tensor:
    """`[..., G, K]` to `[..., H, K]`: the entries of the key head that each value head reads."""
    return repeat(x_GK, "... g k -> ... (g copies) k", copies=num_heads // x_GK.shape[-2])

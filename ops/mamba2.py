"""The Mamba-2 state update: `h = exp(dt a) h + dt x Bᵀ`, `y = h C` (Dao and Gu 2024, "Transformers are SSMs").

Shapes: L flat tokens, S sequences, R requested states, C chunks, Q (and T) tokens of a chunk, B rows of a decode,
H heads, G groups, K heads of a group (head h uses group h // K), P head dim, N state dim.

Every form takes `dt` as it enters the update (bias, softplus and clamp applied) and `a = -exp(A_log)`, and leaves the
skip `D x` to its caller. State arithmetic has the dtype `state_dtype_for(operands)`; `y` has the dtype of `x`.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for


def mamba2_recurrent(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, h0_SHPN: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """Token by token: the definition that every other form is tested against.

    `h0_SHPN` holds the state each sequence starts from. Returns `y_LHP` (zero for padding tokens) and the states
    `[R, H, P, N]` at the layout's requested positions. O(L) sequential steps.
    """
    dtype = state_dtype_for(x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN)
    x_LHP_, dt_LH, a_H = x_LHP.to(dtype), dt_LH.to(dtype), a_H.to(dtype)
    heads_per_group = x_LHP.shape[1] // b_LGN.shape[1]
    b_LHN = b_LGN.to(dtype).repeat_interleave(heads_per_group, dim=1)
    c_LHN = c_LGN.to(dtype).repeat_interleave(heads_per_group, dim=1)
    wanted = list(zip(layout.state_sequence_R.tolist(), layout.state_length_R.tolist(), strict=True))
    y_LHP = torch.zeros_like(x_LHP_)
    states: dict[tuple[int, int], Tensor] = {}
    for sequence, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        h_HPN = h0_SHPN[sequence].to(dtype)
        for offset in range(length):
            t = start + offset
            update_HPN = einsum(dt_LH[t, :, None] * x_LHP_[t], b_LHN[t], "h p, h n -> h p n")
            h_HPN = (dt_LH[t] * a_H).exp()[:, None, None] * h_HPN + update_HPN
            y_LHP[t] = einsum(h_HPN, c_LHN[t], "h p n, h n -> h p")
            states[sequence, offset + 1] = h_HPN
    states_RHPN = torch.stack([states[key] for key in wanted]) if wanted else h0_SHPN[:0].to(dtype)
    return y_LHP.to(x_LHP.dtype), states_RHPN


def mamba2_chunked(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, h0_SHPN: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """Same contract as `mamba2_recurrent`, in one pass of matrix products and one sequential step per chunk.

    With `l` the running sum of `dt a` inside a chunk and `h0` the state entering it:
    `Y = e^l ∘ (C h0ᵀ) + (M ∘ e^{l_i - l_j} ∘ C Bᵀ)(dt ∘ X)`, M lower triangular. O(L Q H) memory for the decays.
    """
    dtype = state_dtype_for(x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN)
    num_groups = b_LGN.shape[1]
    dt_CQH = layout.to_chunks(dt_LH)
    # In float64, because l_i - l_j of two close tokens behind a strong decay cancels: in float32 its error would be
    # that of the large sums, where the recurrence only ever rounds the small difference.
    log_CQH = torch.cumsum(dt_CQH.double() * a_H.double(), dim=1)
    log_CGKQ = rearrange(log_CQH, "c q (g k) -> c g k q", g=num_groups)
    dtx_CGKQP = rearrange(
        layout.to_chunks(x_LHP).to(dtype) * dt_CQH.to(dtype)[..., None], "c q (g k) p -> c g k q p", g=num_groups
    )
    b_CGQN = rearrange(layout.to_chunks(b_LGN).to(dtype), "c q g n -> c g q n")
    c_CGQN = rearrange(layout.to_chunks(c_LGN).to(dtype), "c q g n -> c g q n")

    # Places without a token have dt = 0: they neither decay nor add, so the last place stands for the chunk's end.
    to_end_CGKQ = (log_CGKQ[..., -1:] - log_CGKQ).exp().to(dtype)
    added_CGKPN = einsum(dtx_CGKQP * to_end_CGKQ[..., None], b_CGQN, "c g k q p, c g q n -> c g k p n")
    kept_CGK = log_CGKQ[..., -1].exp().to(dtype)
    h0_SGKPN = rearrange(h0_SHPN.to(dtype), "s (g k) p n -> s g k p n", g=num_groups)
    entering_CGKPN = _states_entering_chunks(kept_CGK, added_CGKPN, h0_SGKPN, layout.sequence_chunks_SJ)

    y_CGKQP = _attend_within_chunks(log_CGKQ, dtx_CGKQP, b_CGQN, c_CGQN)
    from_state_CGKQP = einsum(entering_CGKPN, c_CGQN, "c g k p n, c g q n -> c g k q p")
    y_CGKQP = y_CGKQP + log_CGKQ.exp().to(dtype)[..., None] * from_state_CGKQP
    y_LHP = layout.from_chunks(rearrange(y_CGKQP, "c g k q p -> c q (g k) p"))

    wanted_R = layout.state_chunk_R
    states_RGKPN = kept_CGK[wanted_R][..., None, None] * entering_CGKPN[wanted_R] + added_CGKPN[wanted_R]
    return y_LHP.to(x_LHP.dtype), rearrange(states_RGKPN, "r g k p n -> r (g k) p n")


def _attend_within_chunks(log_CGKQ: Tensor, dtx_CGKQP: Tensor, b_CGQN: Tensor, c_CGQN: Tensor) -> Tensor:
    """What the tokens of a chunk give each other: `(M ∘ e^{l_i - l_j} ∘ C Bᵀ)(dt ∘ X)`, `[C, G, K, Q, P]`."""
    chunk_size = log_CGKQ.shape[-1]
    future_QT = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=log_CGKQ.device).triu(1)
    difference_CGKQT = (log_CGKQ[..., :, None] - log_CGKQ[..., None, :]).to(dtx_CGKQP.dtype)
    decay_CGKQT = difference_CGKQT.masked_fill(future_QT, -torch.inf).exp()
    score_CGQT = einsum(c_CGQN, b_CGQN, "c g q n, c g t n -> c g q t")
    return (decay_CGKQT * score_CGQT[:, :, None]) @ dtx_CGKQP


def _states_entering_chunks(
    kept_CGK: Tensor, added_CGKPN: Tensor, h0_SGKPN: Tensor, sequence_chunks_SJ: Tensor
) -> Tensor:
    """The state before each chunk, given that a chunk turns `h` into `kept h + added`. One step per chunk position."""
    num_chunks = kept_CGK.shape[0]
    # One row more than there are chunks: sequences that have ended write there.
    entering_CGKPN = added_CGKPN.new_empty(num_chunks + 1, *added_CGKPN.shape[1:])
    h_SGKPN = h0_SGKPN
    for chunk_S in sequence_chunks_SJ.unbind(1):
        entering_CGKPN[chunk_S] = h_SGKPN
        chunk_S = chunk_S.clamp(max=num_chunks - 1)  # an ended sequence's state is never written again
        h_SGKPN = kept_CGK[chunk_S][..., None, None] * h_SGKPN + added_CGKPN[chunk_S]
    return entering_CGKPN[:num_chunks]


def mamba2_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    """One token for each row: advances `state_pool[slots_B]` in place and returns `y_BHP`.

    `state_pool` `[slots + 1, H, P, N]` of any float dtype is written at `slots_B` (int64) only. Slots other than 0
    must be distinct. Slot 0 belongs to padding rows, in any number: it is read and written back unchanged.
    """
    dtype = state_dtype_for(x_BHP, dt_BH, a_H, b_BGN, c_BGN, state_pool)
    num_groups = b_BGN.shape[1]
    # dt = 0 leaves a state as it is: rows that share slot 0 all write the same, and it can't drift.
    dt_BH = torch.where(slots_B[:, None] == 0, 0, dt_BH).to(dtype)
    dtx_BGKP = rearrange(dt_BH[..., None] * x_BHP.to(dtype), "b (g k) p -> b g k p", g=num_groups)
    kept_BGK = rearrange((dt_BH * a_H.to(dtype)).exp(), "b (g k) -> b g k", g=num_groups)
    state_BGKPN = rearrange(state_pool[slots_B].to(dtype), "b (g k) p n -> b g k p n", g=num_groups)
    added_BGKPN = dtx_BGKP[..., None] * b_BGN.to(dtype)[:, :, None, None]
    state_BGKPN = kept_BGK[..., None, None] * state_BGKPN + added_BGKPN
    state_BHPN = rearrange(state_BGKPN, "b g k p n -> b (g k) p n").to(state_pool.dtype)
    state_pool.index_put_((slots_B,), state_BHPN)
    y_BGKP = einsum(state_BGKPN, c_BGN.to(dtype), "b g k p n, b g n -> b g k p")
    return rearrange(y_BGKP, "b g k p -> b (g k) p").to(x_BHP.dtype)

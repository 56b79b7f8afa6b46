"""Gated DeltaNet (GDN): the delta rule whose state decays by one scalar per head (arXiv 2412.06464).

Shapes: L flat tokens, S sequences, R requested states, B rows, C chunks, Q tokens of a chunk, G key heads, H value
heads (value head h reads key head h // (H // G)), K key dim, V value dim.
"""

from __future__ import annotations

from einops import repeat
from torch import Tensor

from hybrid_runtime.ops.delta_rule import (
    DeltaChunks,
    delta_recurrent,
    delta_step,
    head_chunks,
    scan_chunks,
    sums_after,
    sums_between,
    sums_until,
)
from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for


def gdn_recurrent(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LH: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """Token-by-token definition: S' = a S; u = β (v - S' k); S = S' + u kᵀ; y = S q.

    q and k are normalised and scaled by the caller; `log_a` <= 0, β in [0, 1]. Returns outputs `[L, H, V]` in v's dtype
    and the states at the layout's requested positions `[R, H, V, K]` in the dtype of state arithmetic. Padding tokens
    yield 0.
    """
    return delta_recurrent(q_LGK, k_LGK, v_LHV, log_a_LH[..., None], beta_LH, s0_SHVK, layout)


def gdn_chunked(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LH: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """`gdn_recurrent` in one pass over the layout's chunks; same arguments and result. Mutates nothing; differentiable.

    Decays enter as exponentials of sums of `log_a` along a path, each <= 1, so that no decay is too strong.
    """
    dtype = state_dtype_for(q_LGK, k_LGK, v_LHV, log_a_LH, beta_LH, s0_SHVK)
    num_key_heads, num_heads = k_LGK.shape[1], v_LHV.shape[1]
    q_CGQK, k_CGQK = (head_chunks(x_LGK, layout, num_key_heads, dtype) for x_LGK in (q_LGK, k_LGK))
    v_CHQV, log_a_CHQ1, beta_CHQ1 = (
        head_chunks(x_LHX, layout, num_heads, dtype) for x_LHX in (v_LHV, log_a_LH[..., None], beta_LH[..., None])
    )

    def per_value_head(x_CGQX: Tensor) -> Tensor:
        return repeat(x_CGQX, "c g q x -> c (g copies) q x", copies=num_heads // num_key_heads)

    between_CHQQ = sums_between(log_a_CHQ1)[..., 0].exp()
    from_start_CHQ1 = sums_until(log_a_CHQ1).exp()
    k_CHQK = per_value_head(k_CGQK)
    chunks = DeltaChunks(
        system_CHQQ=(beta_CHQ1 * between_CHQQ * per_value_head(k_CGQK @ k_CGQK.mT)).tril(-1),
        scores_CHQQ=between_CHQQ * per_value_head(q_CGQK @ k_CGQK.mT),
        q_in_CHQK=from_start_CHQ1 * per_value_head(q_CGQK),
        k_in_CHQK=from_start_CHQ1 * k_CHQK,
        k_out_CHQK=sums_after(log_a_CHQ1).exp() * k_CHQK,
        v_CHQV=v_CHQV,
        beta_CHQ1=beta_CHQ1,
        decay_CHK=from_start_CHQ1[:, :, -1],
    )
    y_LHV, states_RHVK = scan_chunks(chunks, s0_SHVK, layout)
    return y_LHV.to(v_LHV.dtype), states_RHVK


def gdn_step(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    log_a_BH: Tensor,
    beta_BH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token of each row, in place on `state_pool[slots_B]` (`[slots + 1, H, V, K]`); outputs `[B, H, V]`.

    Rows of slot 0 are padding; they may repeat and leave slot 0 as it is.
    """
    return delta_step(q_BGK, k_BGK, v_BHV, log_a_BH[..., None], beta_BH, state_pool, slots_B)

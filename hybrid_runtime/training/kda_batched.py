"""KDA over a batch of equally long sequences from zero states: the form that training uses.

Where `ops/kda.py` serves ragged batches with states in and out, this form has only what training needs: short chunks
with a bound on the decay, so that the decays inside a chunk factor into two matrices, and a scan over chunks whose
hand-written backward pass touches nothing but the state. Forward and backward take half the CPU time of `kda_chunked`,
and all but the scan compiles.

With log decays summed inside a chunk to g_i, S the state before the chunk, and T the inverse of
I + tril(beta_i <k_i exp(g_i), k_j exp(-g_j)>, -1):

    delta = T (beta v) - T (beta k exp(g)) S              what each token adds for its key
    o     = (q exp(g)) S + tril(<q_i exp(g_i), k_j exp(-g_j)>) delta
    S'    = exp(g_Q) S + (k exp(g_Q - g))^T delta

(Kimi Linear, arXiv 2510.26692, section 3, which builds on the WY form of DeltaNet.)

Shapes: B batch, C chunks of Q tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

CHUNK_SIZE = 16
# exp(-5) keeps 0.7 % of a channel: a token that wants to forget more than that forgets all but this much in training.
# Bounded so, the log decays of half a chunk stay within +-40 and their exponentials well inside float32.
MIN_LOG_DECAY = -5.0


class _ChunkStates(torch.autograd.Function):
    """State before each chunk: S_0 = 0, S_{c+1} = decay_c * S_c + key_c^T (u_c - w_c S_c)."""

    @staticmethod
    def forward(ctx: Any, key_CBHQK: Tensor, decay_CBHK: Tensor, u_CBHQV: Tensor, w_CBHQK: Tensor) -> Tensor:
        num_chunks, *lead, _, key_dim = key_CBHQK.shape
        states = u_CBHQV.new_zeros(num_chunks, *lead, key_dim, u_CBHQV.shape[-1])
        for c in range(num_chunks - 1):
            delta_BHQV = u_CBHQV[c] - w_CBHQK[c] @ states[c]
            torch.matmul(key_CBHQK[c].mT, delta_BHQV, out=states[c + 1])
            states[c + 1].addcmul_(decay_CBHK[c, ..., None], states[c])
        ctx.save_for_backward(key_CBHQK, decay_CBHK, u_CBHQV, w_CBHQK, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key_CBHQK, decay_CBHK, u_CBHQV, w_CBHQK, states_CBHKV = ctx.saved_tensors
        (grad_states_CBHKV,) = grads
        # grad_next[c] is the whole gradient of the state behind chunk c; nothing reads the state behind the last one.
        grad_next_CBHKV = torch.zeros_like(states_CBHKV)
        grad_u_CBHQV = torch.zeros_like(u_CBHQV)
        for c in range(key_CBHQK.shape[0] - 2, -1, -1):
            if c + 2 < key_CBHQK.shape[0]:
                torch.matmul(w_CBHQK[c + 1].mT, grad_u_CBHQV[c + 1], out=grad_next_CBHKV[c])
                grad_next_CBHKV[c].neg_().addcmul_(decay_CBHK[c + 1, ..., None], grad_next_CBHKV[c + 1])
            grad_next_CBHKV[c] += grad_states_CBHKV[c + 1]
            torch.matmul(key_CBHQK[c], grad_next_CBHKV[c], out=grad_u_CBHQV[c])
        delta_CBHQV = u_CBHQV - w_CBHQK @ states_CBHKV
        grad_key_CBHQK = delta_CBHQV @ grad_next_CBHKV.mT
        grad_decay_CBHK = (grad_next_CBHKV * states_CBHKV).sum(-1)
        grad_w_CBHQK = -(grad_u_CBHQV @ states_CBHKV.mT)
        return grad_key_CBHQK, grad_decay_CBHK, grad_u_CBHQV, grad_w_CBHQK


def chunk_states(key_CBHQK: Tensor, decay_CBHK: Tensor, u_CBHQV: Tensor, w_CBHQK: Tensor) -> Tensor:
    """States before each chunk `[C, B, H, K, V]`, of the recurrence in the class above; differentiable."""
    states: Tensor = _ChunkStates.apply(key_CBHQK, decay_CBHK, u_CBHQV, w_CBHQK)
    return states


def _unit_lower_inverse(strict_QQ: Tensor) -> Tensor:
    """Inverse of I + N for strictly lower triangular N, as the product of I + (-N)^(2^p): N is nilpotent."""
    size = strict_QQ.shape[-1]
    power_QQ = -strict_QQ
    inverse_QQ = power_QQ + torch.eye(size, dtype=strict_QQ.dtype, device=strict_QQ.device)
    covered = 2
    while covered < size:
        power_QQ = power_QQ @ power_QQ
        inverse_QQ = inverse_QQ + inverse_QQ @ power_QQ
        covered *= 2
    return inverse_QQ


def to_chunks(x_BLHP: Tensor) -> Tensor:
    """`[B, L, H, P]` to `[C, B, H, Q, P]`, chunks first because the scan walks over them. L must be a multiple of Q."""
    return rearrange(x_BLHP, "b (c q) h p -> c b h q p", q=CHUNK_SIZE)


def prepare_chunks(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, log_a_BLHK: Tensor, beta_BLH: Tensor
) -> tuple[Tensor, ...]:
    """Everything inside the chunks: `(key, decay, u, w)` for `chunk_states`, then `(q, scores)` for `chunk_outputs`.

    Queries come scaled, queries and keys normalised, all in one dtype. Log decays below `MIN_LOG_DECAY` are raised.
    """
    q, k, v = to_chunks(q_BLHK), to_chunks(k_BLHK), to_chunks(v_BLHV)
    beta = rearrange(beta_BLH, "b (c q) h -> c b h q 1", q=CHUNK_SIZE)
    g = to_chunks(log_a_BLHK.clamp_min(MIN_LOG_DECAY)).cumsum(-2)
    middle = g[..., CHUNK_SIZE // 2 : CHUNK_SIZE // 2 + 1, :]
    rise, fall = (g - middle).exp(), (middle - g).exp()
    k_fall_KQ = (k * fall).mT
    scores = (q * rise @ k_fall_KQ).tril()
    inverse = _unit_lower_inverse((beta * k * rise @ k_fall_KQ).tril(-1))
    last = g[..., -1:, :]
    u = inverse @ (beta * v)
    w = inverse @ (beta * k * g.exp())
    return k * (last - g).exp(), last.squeeze(-2).exp(), u, w, q * g.exp(), scores


def chunk_outputs(states: Tensor, u: Tensor, w: Tensor, q: Tensor, scores: Tensor) -> Tensor:
    """Outputs `[B, L, H, V]` from the states before each chunk and what `prepare_chunks` returned."""
    o = q @ states + scores @ (u - w @ states)
    return rearrange(o, "c b h q v -> b (c q) h v")


def kda_batched(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, log_a_BLHK: Tensor, beta_BLH: Tensor) -> Tensor:
    """KDA outputs `[B, L, H, V]` of B sequences of L tokens from zero states; L must be a multiple of `CHUNK_SIZE`."""
    key, decay, u, w, q, scores = prepare_chunks(q_BLHK, k_BLHK, v_BLHV, log_a_BLHK, beta_BLH)
    return chunk_outputs(chunk_states(key, decay, u, w), u, w, q, scores)

"""The twins as functions with the signatures of the PyTorch forms, and what goes to the PyTorch form instead.

Shapes: as in the PyTorch forms' files.
"""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor
from torch.nn import functional

from hybrid_runtime.ops import attention, conv, gdn, kda, mamba2, opaque
from hybrid_runtime.ops.cpu_kernels import schemas  # noqa: F401 (defines the operators)
from hybrid_runtime.ops.cpu_kernels.build import ensure_built
from hybrid_runtime.ops.cpu_kernels.packed import MULTIPLIES_BFLOAT16
from hybrid_runtime.ops.draw import DrawInputs, require_drawable
from hybrid_runtime.ops.ragged import RaggedLayout

_NARROW = {torch.bfloat16, torch.float32}
_ops = torch.ops.hybrid_runtime_cpu
_NO_WINDOW = 2**40  # more than any context


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, for bfloat16 and float32 with an own kernel up to 64 rows of x.

    Weights are read as they are, `[O, I]` and contiguous: no packed copy. Sums are float32. More rows, other dtypes and
    other strides go to aten.
    """
    if not _is_stored(weight_OI):
        return functional.linear(x, weight_OI, bias_O)
    _build_unless_traced()
    return _ops.linear(x, weight_OI, bias_O)


def mamba2_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    """As `ops.mamba2.mamba2_step`; each state is read once and written once."""
    if not _arithmetic_is_the_pools(state_pool, x_BHP, dt_BH, a_H, b_BGN, c_BGN):
        return mamba2.mamba2_step(x_BHP, dt_BH, a_H, b_BGN, c_BGN, state_pool, slots_B)
    _build_unless_traced()
    return _ops.mamba2_step(x_BHP, dt_BH, a_H, b_BGN, c_BGN, state_pool, slots_B)


def mamba2_chunked(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, h0_SHPN: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """As `ops.mamba2.mamba2_chunked`; the layout's chunk size is not used.

    Four tokens at a time. Where x, b and c are bfloat16 and the processor multiplies that, in chunks of 32, by products
    of matrices rounded to it: of each term of a state one factor is rounded, of a term of y two, and y. Float64
    operands go to the PyTorch form.
    """
    operands = (x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN)
    if not {operand.dtype for operand in operands} <= _NARROW:
        return opaque.mamba2_chunked(*operands, layout)
    _build_unless_traced()
    all_narrow = {x_LHP.dtype, b_LGN.dtype, c_LGN.dtype} == {torch.bfloat16}
    y_LHP, states_RHPN = _ops.mamba2_prefill(
        x_LHP if all_narrow and MULTIPLIES_BFLOAT16 else x_LHP.float(),
        dt_LH,
        a_H,
        b_LGN,
        c_LGN,
        h0_SHPN.float(),
        layout.token_sequence_L,
        layout.token_offset_L,
        layout.state_sequence_R,
        layout.state_length_R,
    )
    return y_LHP.to(x_LHP.dtype), states_RHPN


def gdn_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHV: Tensor, log_a_BH: Tensor, beta_BH: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    """As `ops.gdn.gdn_step`; each state is read once and written once."""
    if not _arithmetic_is_the_pools(state_pool, q_BGK, k_BGK, v_BHV, log_a_BH, beta_BH):
        return gdn.gdn_step(q_BGK, k_BGK, v_BHV, log_a_BH, beta_BH, state_pool, slots_B)
    _build_unless_traced()
    return _ops.delta_step(q_BGK, k_BGK, v_BHV, log_a_BH[..., None], beta_BH, state_pool, slots_B)


def kda_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHV: Tensor, log_a_BHK: Tensor, beta_BH: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    """As `ops.kda.kda_step`; each state is read once and written once."""
    if not _arithmetic_is_the_pools(state_pool, q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH):
        return kda.kda_step(q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH, state_pool, slots_B)
    _build_unless_traced()
    return _ops.delta_step(q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH, state_pool, slots_B)


def conv_step(x_BD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, window_pool: Tensor, slots_B: Tensor) -> Tensor:
    """As `ops.conv.conv_step`, to the same bits; slot 0 is left as it is."""
    if window_pool.dtype != x_BD.dtype or not _have_one_width(x_BD, weight_DW, bias_D):
        return conv.conv_step(x_BD, weight_DW, bias_D, window_pool, slots_B)
    _build_unless_traced()
    return _ops.conv_step(x_BD, weight_DW, bias_D, window_pool, slots_B)


def causal_conv(
    x_LD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, windows_SWD: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """As `ops.conv.causal_conv`, to the same bits."""
    windows_SWD = windows_SWD.to(x_LD.dtype)
    if not _have_one_width(x_LD, weight_DW, bias_D):
        return conv.causal_conv(x_LD, weight_DW, bias_D, windows_SWD, layout)
    _build_unless_traced()
    first_R = layout.chunk_tokens_CQ[layout.state_chunk_R, 0]
    return _ops.causal_conv(
        x_LD,
        weight_DW,
        bias_D,
        windows_SWD,
        layout.token_sequence_L,
        layout.token_offset_L,
        layout.state_sequence_R,
        layout.state_length_R,
        first_R + layout.chunk_mask_CQ[layout.state_chunk_R].sum(dim=1),
    )


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
    """As `ops.attention.prefill_attention`, in bfloat16; other dtypes, or a processor that does not multiply bfloat16,
    run that.

    Weights of the values are rounded to bfloat16, as in the CPU's own fused attention.
    """
    table = (req_to_token, request_rows_S, context_lens_S)
    if {q_LHD.dtype, k_pool.dtype, v_pool.dtype} != {torch.bfloat16} or not MULTIPLIES_BFLOAT16:
        return opaque.prefill_attention(q_LHD, k_pool, v_pool, *table, layout, scale=scale, window=window)
    _build_unless_traced()
    lengths = (layout.lengths_S, layout.starts_S)
    return _ops.prefill_attention(
        q_LHD, k_pool, v_pool, *table, *lengths, scale, _NO_WINDOW if window is None else window
    )


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
    """As `ops.attention.decode_attention`, over each row's own context: `max_context_len` is not used.

    Copies no keys or values. The work is split by pieces of a context, so that one long row uses all threads.
    """
    if k_pool.dtype != v_pool.dtype or not _have_one_width(q_BHD, k_pool):
        return attention.decode_attention(
            q_BHD,
            k_pool,
            v_pool,
            req_to_token,
            request_rows_B,
            context_lens_B,
            req_to_token.shape[1],
            scale=scale,
            window=window,
        )
    _build_unless_traced()
    return _ops.decode_attention(
        q_BHD,
        k_pool,
        v_pool,
        req_to_token,
        request_rows_B,
        context_lens_B,
        scale,
        -1 if window is None else window,
    )


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
    """As `ops.attention.decode_mla`: the latent is the one key, and its first part the one value, of all heads."""
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
    """As `ops.attention.decode_latents`: `decode_attention` with one key-value head."""
    return decode_attention(
        q_BHC,
        latent_pool[:, None],
        latent_pool[:, None, :latent_dim],
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
    )


def draw_tokens(logits_BV: Tensor, options: DrawInputs) -> Tensor:
    """As `ops.draw.draw_tokens`, without a sort. Each thread takes whole rows."""
    require_drawable(logits_BV, options)
    _build_unless_traced()
    return _ops.draw_tokens(logits_BV, *options)


def _arithmetic_is_the_pools(state_pool: Tensor, *operands: Tensor) -> bool:
    """Whether a kernel exists for these dtypes: the arithmetic of the state update follows from the pool's alone."""
    return _is_stored(state_pool, *operands) and (
        state_pool.dtype == torch.float64 or all(operand.dtype != torch.float64 for operand in operands)
    )


def _have_one_width(*tensors: Tensor | None) -> bool:
    """Whether a kernel exists for these dtypes: all of them float64, or none."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes == {torch.float64} or dtypes <= _NARROW


def _is_stored(*tensors: Tensor) -> bool:
    return {tensor.dtype for tensor in tensors} <= {*_NARROW, torch.float64}


def _build_unless_traced() -> None:
    if not torch.compiler.is_compiling():
        ensure_built()

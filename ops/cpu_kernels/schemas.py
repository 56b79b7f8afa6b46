"""What the compiler is told about the kernels: their schemas, with every mutation, and the shapes of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.ops.cpu_kernels.build import ensure_built_or_building

_library = torch.library.Library("hybrid_runtime_cpu", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight_OI, Tensor? bias_O) -> Tensor")
_library.define(
    "mamba2_step(Tensor x_BHP, Tensor dt_BH, Tensor a_H, Tensor b_BGN, Tensor c_BGN, Tensor(a!) state_pool, "
    "Tensor slots_B) -> Tensor"
)
_library.define(
    "mamba2_prefill(Tensor x_LHP, Tensor dt_LH, Tensor a_H, Tensor b_LGN, Tensor c_LGN, Tensor h0_SHPN, "
    "Tensor token_sequence_L, Tensor token_offset_L, Tensor state_sequence_R, Tensor state_length_R) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "delta_step(Tensor q_BGK, Tensor k_BGK, Tensor v_BHV, Tensor log_a_BHK, Tensor beta_BH, Tensor(a!) state_pool, "
    "Tensor slots_B) -> Tensor"
)
_library.define(
    "conv_step(Tensor x_BD, Tensor weight_DW, Tensor? bias_D, Tensor(a!) window_pool, Tensor slots_B) -> Tensor"
)
_library.define(
    "causal_conv(Tensor x_LD, Tensor weight_DW, Tensor? bias_D, Tensor windows_SWD, Tensor token_sequence_L, "
    "Tensor token_offset_L, Tensor state_sequence_R, Tensor state_length_R, Tensor state_end_R) -> (Tensor, Tensor)"
)
_library.define(
    "prefill_attention(Tensor q_LHD, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor request_rows_S, "
    "Tensor context_lens_S, Tensor lengths_S, Tensor starts_S, float scale, int window) -> Tensor"
)
_library.define(
    "decode_attention(Tensor q_BHD, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor request_rows_B, "
    "Tensor context_lens_B, float scale, int window) -> Tensor"
)
_library.define(
    "draw_tokens(Tensor logits_BV, Tensor temperature_B, Tensor? min_p_B, Tensor? top_k_B, Tensor? top_p_B, "
    "Tensor seeds_B, Tensor sample_indices_B, Tensor positions_B) -> Tensor"
)


# A traced program holds the kernels themselves, so that tracing, too, is a first use.


@torch.library.register_fake("hybrid_runtime_cpu::linear", lib=_library)
def _linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    ensure_built_or_building()
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


@torch.library.register_fake("hybrid_runtime_cpu::mamba2_step", lib=_library)
def _mamba2_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    ensure_built_or_building()
    return x_BHP.new_empty(x_BHP.shape)


@torch.library.register_fake("hybrid_runtime_cpu::mamba2_prefill", lib=_library)
def _mamba2_prefill(
    x_LHP: Tensor,
    dt_LH: Tensor,
    a_H: Tensor,
    b_LGN: Tensor,
    c_LGN: Tensor,
    h0_SHPN: Tensor,
    token_sequence_L: Tensor,
    token_offset_L: Tensor,
    state_sequence_R: Tensor,
    state_length_R: Tensor,
) -> tuple[Tensor, Tensor]:
    ensure_built_or_building()
    return x_LHP.new_empty(x_LHP.shape), h0_SHPN.new_empty(state_sequence_R.shape[0], *h0_SHPN.shape[1:])


@torch.library.register_fake("hybrid_runtime_cpu::delta_step", lib=_library)
def _delta_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHV: Tensor, log_a_BHK: Tensor, beta_BH: Tensor, state_pool: Tensor, slots_B: Tensor
) -> Tensor:
    ensure_built_or_building()
    return v_BHV.new_empty(v_BHV.shape)


@torch.library.register_fake("hybrid_runtime_cpu::conv_step", lib=_library)
def _conv_step(x_BD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, window_pool: Tensor, slots_B: Tensor) -> Tensor:
    ensure_built_or_building()
    return x_BD.new_empty(x_BD.shape)


@torch.library.register_fake("hybrid_runtime_cpu::causal_conv", lib=_library)
def _causal_conv(
    x_LD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    windows_SWD: Tensor,
    token_sequence_L: Tensor,
    token_offset_L: Tensor,
    state_sequence_R: Tensor,
    state_length_R: Tensor,
    state_end_R: Tensor,
) -> tuple[Tensor, Tensor]:
    ensure_built_or_building()
    return x_LD.new_empty(x_LD.shape), x_LD.new_empty(state_sequence_R.shape[0], *windows_SWD.shape[1:])


@torch.library.register_fake("hybrid_runtime_cpu::prefill_attention", lib=_library)
def _prefill_attention(
    q_LHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    lengths_S: Tensor,
    starts_S: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    ensure_built_or_building()
    return q_LHD.new_empty(*q_LHD.shape[:2], v_pool.shape[2])


@torch.library.register_fake("hybrid_runtime_cpu::decode_attention", lib=_library)
def _decode_attention(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    ensure_built_or_building()
    return q_BHD.new_empty(*q_BHD.shape[:2], v_pool.shape[2])


@torch.library.register_fake("hybrid_runtime_cpu::draw_tokens", lib=_library)
def _draw_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    min_p_B: Tensor | None,
    top_k_B: Tensor | None,
    top_p_B: Tensor | None,
    seeds_B: Tensor,
    sample_indices_B: Tensor,
    positions_B: Tensor,
) -> Tensor:
    ensure_built_or_building()
    return seeds_B.new_empty(seeds_B.shape)

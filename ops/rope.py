"""Rotary position embedding (Su et al. 2021).

Shapes: L tokens, H heads, D head dim, E rotary dim (even, at most D), F = E // 2 frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.ops.ragged import state_dtype_for


def rope_inv_freq(theta: float, rotary_dim: int) -> Tensor:
    """`theta ** (-2 i / rotary_dim)` for each pair i, float32 `[F]`: the unscaled frequencies."""
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))


def rope_cos_sin(
    positions_L: Tensor, inv_freq_F: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[L, E]` of the given `dtype`; columns i and i + F both belong to frequency i.

    Angles have the dtype of `inv_freq_F`, float32 at least: models compute them in float32 whatever dtype they run in,
    and a caller who wants float64 angles passes float64 frequencies. `attention_scaling` multiplies both tables.
    """
    angle_dtype = state_dtype_for(inv_freq_F)
    angle_LF = positions_L[:, None].to(angle_dtype) * inv_freq_F.to(angle_dtype)
    angle_LE = torch.cat([angle_LF, angle_LF], dim=-1)
    return (angle_LE.cos() * attention_scaling).to(dtype), (angle_LE.sin() * attention_scaling).to(dtype)


def apply_rope(x_LHD: Tensor, cos_LE: Tensor, sin_LE: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates the first E channels of each head by the tables of `rope_cos_sin`; the other channels pass through.

    Frequency i turns channels i and i + F (GPT-NeoX), or 2 i and 2 i + 1 if `interleaved` (GPT-J); each stays in its
    place. Returns a new tensor of the dtype of `x_LHD`. Raises ValueError if E exceeds D.
    """
    rotary_dim = cos_LE.shape[-1]
    if rotary_dim > x_LHD.shape[-1]:
        raise ValueError(f"rotary dim {rotary_dim} exceeds the head dim {x_LHD.shape[-1]}")
    num_pairs = rotary_dim // 2
    cos_L1F, sin_L1F = cos_LE[:, None, :num_pairs], sin_LE[:, None, :num_pairs]
    rotated_LHE = x_LHD[..., :rotary_dim]
    if interleaved:
        first_LHF, second_LHF = rotated_LHE[..., 0::2], rotated_LHE[..., 1::2]
    else:
        first_LHF, second_LHF = rotated_LHE[..., :num_pairs], rotated_LHE[..., num_pairs:]
    turned = (first_LHF * cos_L1F - second_LHF * sin_L1F, second_LHF * cos_L1F + first_LHF * sin_L1F)
    rotated_LHE = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([rotated_LHE.to(x_LHD.dtype), x_LHD[..., rotary_dim:]], dim=-1)

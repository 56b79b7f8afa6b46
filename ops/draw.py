"""The next token of every row: the maximum, or a draw from the filtered softmax.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.ops.noise import gumbel_noise


class DrawInputs(NamedTuple):
    """How each row chooses its token. A filter that is None is off for all rows.

    A row's draw is a function of its logits and of (seed, sample, position): the same key gives the same token.
    """

    temperature_B: Tensor  # float64, at least 0; 0: greedy
    min_p_B: Tensor | None  # float64 in 0..1: least share of the most likely token's probability; 0: off
    top_k_B: Tensor | None  # int64, at least 1; V or more: off
    top_p_B: Tensor | None  # float64, above 0; 1 or more: off
    seeds_B: Tensor  # int64
    sample_indices_B: Tensor  # int64 in 0..2**32 - 1
    positions_B: Tensor  # int64 in 0..2**32 - 1


def draw_tokens(logits_BV: Tensor, options: DrawInputs) -> Tensor:
    """Ids [B] (int64) of the chosen tokens; each row's depends on its own logits and options alone.

    Of a row with temperature 0: the maximum. Of others: a draw from softmax(logits / temperature), of which min-p, then
    top-k, then top-p have left some tokens; the most likely token always stays. Of equal tokens those with lower ids
    come first. A token at -inf is never chosen, unless there is no other: then it is token 0. Of a row with a NaN the
    token is any of 0..V-1.

    Logits are float32 or float64, contiguous on their last axis, and arithmetic is theirs; sums of shares are float64.
    Sorts the rows if top-k or top-p is not None. Mutates nothing and never waits for the device.

    Raises ValueError if dtypes, shapes, strides or devices don't fit. Values of options are not looked at.
    """
    require_drawable(logits_BV, options)
    drawn_BV = _perturb(logits_BV, options)
    return torch.where(options.temperature_B[:, None] == 0, logits_BV, drawn_BV).argmax(dim=-1)


def require_drawable(logits_BV: Tensor, options: DrawInputs) -> None:
    """Raises ValueError unless the operands are as `draw_tokens` says."""
    if logits_BV.dim() != 2 or logits_BV.shape[1] < 1:
        raise ValueError(f"logits_BV must be [B, V] with at least one token, not {tuple(logits_BV.shape)}")
    if logits_BV.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logits_BV must be of dtype float32 or float64, not {logits_BV.dtype}")
    if logits_BV.shape[1] > 1 and logits_BV.stride(1) != 1:
        raise ValueError("logits_BV must be contiguous behind its first axis")
    for name, option in options._asdict().items():
        if option is None:
            continue
        dtype = torch.float64 if name in ("temperature_B", "min_p_B", "top_p_B") else torch.int64
        if option.dtype != dtype:
            raise ValueError(f"{name} must be of dtype {dtype}, not {option.dtype}")
        if option.shape != logits_BV.shape[:1]:
            raise ValueError(f"{name} must have one value for each of {logits_BV.shape[0]} rows")
        if option.device != logits_BV.device:
            raise ValueError(f"{name} must be on {logits_BV.device}, not on {option.device}")


def _perturb(logits_BV: Tensor, options: DrawInputs) -> Tensor:
    """Scores whose maximum is a draw from the filtered softmax(logits / temperature) (the Gumbel-max trick)."""
    dtype, info = logits_BV.dtype, torch.finfo(logits_BV.dtype)
    logits_BV = logits_BV.clamp(max=info.max)  # inf - inf is no number
    peak_B1 = logits_BV.amax(dim=-1, keepdim=True).clamp(min=info.min)
    temperature_B1 = options.temperature_B.to(dtype).clamp(info.tiny, info.max)[:, None]
    # With the maximum at 0 a tiny temperature sends the others to -inf, and nothing to +inf.
    scaled_BV = (logits_BV - peak_B1) / temperature_B1
    if options.min_p_B is not None:
        log_min_p_B1 = options.min_p_B.to(dtype).log()[:, None]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < log_min_p_B1, -math.inf)
    if options.top_k_B is not None or options.top_p_B is not None:
        is_kept_BV = _is_kept(scaled_BV, options.top_k_B, options.top_p_B)
        scaled_BV = scaled_BV.masked_fill(~is_kept_BV, -math.inf)
    noise_BV = gumbel_noise(options.seeds_B, options.sample_indices_B, options.positions_B, logits_BV.shape[1], dtype)
    return scaled_BV + noise_BV


def _is_kept(scaled_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> Tensor:
    """Which tokens top-k and top-p leave: the k largest, and of them the fewest whose share reaches p."""
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(sorted_BV.shape[1], device=sorted_BV.device)
    is_kept_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_k_B is not None:
        is_kept_BV = place_V < top_k_B[:, None]
        sorted_BV = sorted_BV.masked_fill(~is_kept_BV, -math.inf)
    if top_p_B is not None:
        share_BV = torch.softmax(sorted_BV, dim=-1).to(torch.float64)
        share_before_BV = share_BV.cumsum(dim=-1).roll(1, dims=-1)  # its first place is never read
        is_kept_BV = is_kept_BV & ((share_before_BV < top_p_B[:, None]) | (top_p_B >= 1)[:, None] | (place_V == 0))
    return torch.zeros_like(is_kept_BV).scatter(-1, order_BV, is_kept_BV)

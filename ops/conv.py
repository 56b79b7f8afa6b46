"""The short causal convolution in front of a recurrent mixer: depthwise, W taps, no activation.

y_t = bias + Σ_w weight[:, w] ∘ x_(t - (W - 1) + w). What lies before a sequence's first token comes from its window,
the W - 1 inputs before it, oldest first (zeros for a fresh sequence).

Shapes: L flat tokens, S sequences, R requested states, B rows, D channels, W taps; of a window, W counts W - 1 inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from einops import rearrange
from torch import Tensor

from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for


def conv_recurrent(
    x_LD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, windows_SWD: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """Token-by-token definition; arguments and result as `causal_conv`."""
    wanted = list(zip(layout.state_sequence_R.tolist(), layout.state_length_R.tolist(), strict=True))
    y_LD = torch.zeros_like(x_LD)
    windows_WD = {}
    for sequence, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        window_WD = windows_SWD[sequence].to(x_LD.dtype)
        for t in range(start, start + length):
            inputs_WD = torch.cat([window_WD, x_LD[t : t + 1]])
            y_LD[t] = weigh(inputs_WD.unbind(0), weight_DW, bias_D)
            window_WD = windows_WD[sequence, t - start + 1] = inputs_WD[1:]
    states = [windows_WD[key] for key in wanted]
    return y_LD, torch.stack(states) if states else x_LD.new_zeros(0, *windows_SWD.shape[1:])


def causal_conv(
    x_LD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, windows_SWD: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """Convolves each sequence of `layout`, which continues behind its window `[S, W - 1, D]`.

    Returns outputs `[L, D]` (padding tokens: zero) and the windows `[R, W - 1, D]` that stand at the layout's requested
    positions, both in x's dtype; sums are made in the dtype of state arithmetic. Mutates nothing.
    """
    num_taps = weight_DW.shape[1]
    inputs_ID = torch.cat([x_LD, rearrange(windows_SWD, "s w d -> (s w) d").to(x_LD.dtype)])
    is_token_L = layout.token_sequence_L < layout.num_sequences
    token_L = torch.arange(layout.num_tokens, device=x_LD.device)
    taps_LW = _input_indices(token_L, layout.token_offset_L, layout.token_sequence_L, num_taps, layout)
    # a padding token has no sequence, hence no window to point at
    taps_LW = taps_LW.masked_fill(~is_token_L[:, None], 0)
    y_LD = weigh((inputs_ID[tap_L] for tap_L in taps_LW.unbind(1)), weight_DW, bias_D)
    y_LD = y_LD.masked_fill(~is_token_L[:, None], 0.0).to(x_LD.dtype)

    # the token behind a requested position would read the window that stands there, and itself
    first_R = layout.chunk_tokens_CQ[layout.state_chunk_R, 0]
    behind_R = first_R + layout.chunk_mask_CQ[layout.state_chunk_R].sum(dim=1)
    taps_RW = _input_indices(behind_R, layout.state_length_R, layout.state_sequence_R, num_taps, layout)[:, :-1]
    return y_LD, inputs_ID[taps_RW]


def conv_step(x_BD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, window_pool: Tensor, slots_B: Tensor) -> Tensor:
    """One token of each row: outputs `[B, D]` in x's dtype.

    Shifts x into the windows `window_pool[slots_B]` (`[slots + 1, W - 1, D]`, slots int64) in place. Rows of slot 0 are
    padding and may repeat; slot 0 then holds inputs of any of them.
    """
    inputs_BWD = torch.cat([window_pool[slots_B].to(x_BD.dtype), x_BD[:, None]], dim=1)
    window_pool.index_put_((slots_B,), inputs_BWD[:, 1:].to(window_pool.dtype))
    return weigh(inputs_BWD.unbind(1), weight_DW, bias_D).to(x_BD.dtype)


def _input_indices(
    token_L: Tensor, offset_L: Tensor, sequence_L: Tensor, num_taps: int, layout: RaggedLayout
) -> Tensor:
    """Rows `[L, W]` of (x, windows of all sequences) that the taps of a token read.

    `token_L`: its flat index; `offset_L`: its position in its sequence.
    """
    back_W = torch.arange(num_taps, device=token_L.device) - (num_taps - 1)
    position_LW = offset_L[:, None] + back_W
    window_end_L1 = (layout.num_tokens + (sequence_L + 1) * (num_taps - 1))[:, None]
    return torch.where(position_LW >= 0, token_L[:, None] + back_W, window_end_L1 + position_LW)


def weigh(inputs_D: Iterable[Tensor], weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
    """Σ_w inputs[w] ∘ weight[:, w] + bias in the dtype of state arithmetic; `inputs`: W tensors `[..., D]`.

    One order of summation for every form, so that all of them agree bit for bit.
    """
    total_D: Tensor | None = None
    for input_D, weight_D in zip(inputs_D, weight_DW.unbind(1), strict=True):
        product_D = input_D.to(state_dtype_for(input_D, weight_DW)) * weight_D
        total_D = product_D if total_D is None else total_D + product_D
    assert total_D is not None
    return total_D if bias_D is None else total_D + bias_D

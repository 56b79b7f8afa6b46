"""The next token of every row of a batch, from its logits.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.ops.draw import DrawInputs, draw_tokens
from hybrid_runtime.sampling.inputs import BiasInputs, PenaltyInputs, SamplingInputs
from hybrid_runtime.sampling.logprobs import GatheredLogprobs, gather_logprobs


class SampleResult(NamedTuple):
    """The chosen tokens and, if a row wants them, log-probabilities of the *raw* distribution."""

    token_ids_B: Tensor  # int64
    logprobs: GatheredLogprobs | None


def sample(
    logits_BV: Tensor,
    inputs: SamplingInputs,
    drawn_B: Tensor | None = None,
    draw: Callable[[Tensor, DrawInputs], Tensor] = draw_tokens,
) -> SampleResult:
    """Chooses one token per row; a row's token depends on its own logits and options alone.

    The options apply in vLLM's order: logit bias and forbidden tokens, repetition, frequency and presence penalty, then
    for a greedy row the maximum (the lowest id of several), for the others temperature, min-p, top-k, top-p and a draw.
    Log-probabilities are those of the raw logits, before all of it (vLLM's default, "raw_logprobs").

    Arithmetic is float32, or float64 for float64 logits. A token at -inf is never chosen; if bias and penalties leave a
    row no other, it goes on from its raw logits. Mutates nothing and never waits for the device.

    `drawn_B` are tokens that `draw` has chosen from the raw logits; they are the result if nothing changes logits.
    """
    raw_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    token_ids_B = drawn_B
    if token_ids_B is None or inputs.change_logits:
        scores_BV = apply_bias_and_penalties(raw_BV, inputs)
        token_ids_B = scores_BV.argmax(dim=-1) if inputs.draw is None else draw(scores_BV, inputs.draw)
    if inputs.num_logprobs is None:
        return SampleResult(token_ids_B, None)
    return SampleResult(token_ids_B, gather_logprobs(raw_BV, token_ids_B, inputs.num_logprobs))


def apply_bias_and_penalties(raw_BV: Tensor, inputs: SamplingInputs) -> Tensor:
    """Raw logits after logit bias, forbidden tokens and penalties; the raw ones of a row where nothing else is left."""
    if not inputs.change_logits:
        return raw_BV
    logits_BV = raw_BV
    if inputs.bias is not None:
        logits_BV = _add_bias(logits_BV, inputs.bias)
    if inputs.penalties is not None:
        logits_BV = _penalize(logits_BV, inputs.penalties)
    all_masked_B1 = logits_BV.amax(dim=-1, keepdim=True) == -math.inf
    return torch.where(all_masked_B1, raw_BV, logits_BV)


def _add_bias(logits_BV: Tensor, bias: BiasInputs) -> Tensor:
    indices = (bias.rows_E, bias.token_ids_E)
    logits_BV = logits_BV.clamp(max=torch.finfo(logits_BV.dtype).max)  # inf - inf is no number
    return logits_BV.index_put(indices, bias.values_E.to(logits_BV.dtype), accumulate=True)


def _penalize(logits_BV: Tensor, penalties: PenaltyInputs) -> Tensor:
    dtype, info = logits_BV.dtype, torch.finfo(logits_BV.dtype)
    counts_BV = penalties.output_counts_BV.to(dtype)
    in_output_BV = penalties.output_counts_BV > 0
    # Finite and not 0 in `dtype` too, so that 0 * inf and 0 / 0 cannot happen.
    repetition_B1 = penalties.repetition_B.to(dtype).clamp(info.tiny, info.max)[:, None]
    repeated_BV = torch.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    logits_BV = torch.where(penalties.prompt_mask_BV | in_output_BV, repeated_BV, logits_BV)
    logits_BV = logits_BV - penalties.frequency_B.to(dtype)[:, None] * counts_BV
    return logits_BV - penalties.presence_B.to(dtype)[:, None] * in_output_BV

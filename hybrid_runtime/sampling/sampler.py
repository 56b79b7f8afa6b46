"""The next token of every row of a batch, from its logits.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_runtime.ops.noise import gumbel_noise
from hybrid_runtime.sampling.inputs import BiasInputs, PenaltyInputs, RandomInputs, SamplingInputs
from hybrid_runtime.sampling.logprobs import GatheredLogprobs, gather_logprobs


class SampleResult(NamedTuple):
    """The chosen tokens and, if a row wants them, log-probabilities of the *raw* distribution."""

    token_ids_B: Tensor  # int64
    logprobs: GatheredLogprobs | None


def sample(logits_BV: Tensor, inputs: SamplingInputs) -> SampleResult:
    """Chooses one token per row; a row's token depends on its own logits and options alone.

    The options apply in vLLM's order: logit bias and forbidden tokens, repetition, frequency and presence penalty, then
    for a greedy row the maximum (the lowest id of several), for the others temperature, min-p, top-k, top-p and a draw.
    Log-probabilities are those of the raw logits, before all of it (vLLM's default, "raw_logprobs").

    Arithmetic is float32, or float64 for float64 logits. A token at -inf is never chosen; if bias and penalties leave a
    row no other, it goes on from its raw logits. Mutates nothing and never waits for the device.
    """
    raw_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    scores_BV = apply_bias_and_penalties(raw_BV, inputs)
    if inputs.random is not None:
        drawn_BV = _perturb(scores_BV, inputs.random)
        scores_BV = torch.where(inputs.random.is_greedy_B[:, None], scores_BV, drawn_BV)
    token_ids_B = scores_BV.argmax(dim=-1)
    if inputs.num_logprobs is None:
        return SampleResult(token_ids_B, None)
    return SampleResult(token_ids_B, gather_logprobs(raw_BV, token_ids_B, inputs.num_logprobs))


def apply_bias_and_penalties(raw_BV: Tensor, inputs: SamplingInputs) -> Tensor:
    """Raw logits after logit bias, forbidden tokens and penalties; the raw ones of a row where nothing else is left."""
    if inputs.bias is None and inputs.penalties is None:
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


def _perturb(logits_BV: Tensor, random: RandomInputs) -> Tensor:
    """Scores whose maximum is a draw from the filtered softmax(logits / temperature) (the Gumbel-max trick)."""
    dtype, info = logits_BV.dtype, torch.finfo(logits_BV.dtype)
    logits_BV = logits_BV.clamp(max=info.max)  # as above
    peak_B1 = logits_BV.amax(dim=-1, keepdim=True).clamp(min=info.min)
    temperature_B1 = random.temperature_B.to(dtype).clamp(info.tiny, info.max)[:, None]
    # With the maximum at 0 a tiny temperature sends the others to -inf, and nothing to +inf.
    scaled_BV = (logits_BV - peak_B1) / temperature_B1
    if random.min_p_B is not None:
        log_min_p_B1 = random.min_p_B.to(dtype).log()[:, None]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < log_min_p_B1, -math.inf)
    if random.top_k_B is not None or random.top_p_B is not None:
        scaled_BV = scaled_BV.masked_fill(~_is_kept(scaled_BV, random), -math.inf)
    noise_BV = gumbel_noise(random.seeds_B, random.sample_indices_B, random.positions_B, logits_BV.shape[-1], dtype)
    return scaled_BV + noise_BV


def _is_kept(scaled_BV: Tensor, random: RandomInputs) -> Tensor:
    """Which tokens top-k and top-p leave: the k largest, and of them the fewest whose share reaches p.

    Of equal tokens those with lower ids come first.
    """
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    is_kept_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if random.top_k_B is not None:
        place_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
        is_kept_BV = place_V < random.top_k_B[:, None]
        sorted_BV = sorted_BV.masked_fill(~is_kept_BV, -math.inf)
    if random.top_p_B is not None:
        top_p_B1 = random.top_p_B.to(sorted_BV.dtype)[:, None]
        share_BV = torch.softmax(sorted_BV, dim=-1).cumsum(dim=-1)
        share_before_BV = functional.pad(share_BV[:, :-1], (1, 0))
        is_first_V = functional.pad(torch.zeros_like(order_BV[0, 1:], dtype=torch.bool), (1, 0), value=True)
        is_kept_BV = is_kept_BV & ((share_before_BV < top_p_B1) | (top_p_B1 >= 1) | is_first_V)
    return torch.zeros_like(is_kept_BV).scatter(-1, order_BV, is_kept_BV)

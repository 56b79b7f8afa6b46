"""The next token of every row without a sort, in one launch; twin of `ops/draw.py`.

Tokens are ordered by falling score, and of equal scores by rising id. What min-p, top-k and top-p leave is a front of
this order, and its last token describes it. A draw is the maximum of score + noise over a front. Of a front that is too
long it is good if the filters leave its token; if not, they leave nothing behind it either, and the maximum over the
tokens ahead of it is the next candidate: in the end the same token as from the filtered row. Where that fails too
often, and for the mass of the k largest, the last token is found by bisection on scores. The passes over a row follow
each other in one program; after the first the row lies in the L2 cache.

Shapes: B rows, V tokens of the vocabulary, T tokens of a block, G groups of four of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.language.extra import libdevice

from hybrid_runtime.ops.draw import DrawInputs, require_drawable

# There are fewer rows than processors, so that each program may fill one; float64, which checks others, needs more
# registers for each token. These are the largest blocks that spill nowhere.
BLOCK_TOKENS, BLOCK_TOKENS_DOUBLE = 2048, 512
NUM_WARPS = 16
MAX_DRAWS = 4  # from ever shorter fronts, before a bisection bounds what a row may cost


@triton.jit
def _score(logit, peak, temperature, MAX: tl.constexpr):
    """(logit - peak) / temperature, rounded as the twin's: which scores are equal must not depend on the form."""
    below = tl.minimum(logit, MAX) - peak  # inf - inf is no number
    return below / temperature if peak.dtype == tl.float64 else tl.div_rn(below, temperature)


@triton.jit
def _scores(row_ptr, begin, peak, temperature, NUM_TOKENS: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr):
    """Ids and scores of a block; -inf behind the row."""
    id_T = begin + tl.arange(0, BLOCK)
    logit_T = tl.load(row_ptr + id_T, mask=id_T < NUM_TOKENS, other=-float("inf"))
    return id_T, _score(logit_T, peak, temperature, MAX)


@triton.jit
def _holds(last_score, last_id, score_T, id_T):
    """Whether tokens belong to the front that ends with a token."""
    return (score_T > last_score) | ((score_T == last_score) & (id_T <= last_id))


@triton.jit
def _weigh(
    row_ptr,
    peak,
    temperature,
    last_score,
    last_id,
    by_mass,
    NUM_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
):
    """Σ over a front of e^score, or its size. Never rises with `last_score`: rounded sums keep the terms' order."""
    total_T = tl.zeros([BLOCK], peak.dtype)
    for begin in tl.range(0, NUM_TOKENS, BLOCK):
        id_T, score_T = _scores(row_ptr, begin, peak, temperature, NUM_TOKENS, BLOCK, MAX)
        weight_T = tl.where(by_mass, tl.exp(score_T), 1)
        total_T += tl.where(_holds(last_score, last_id, score_T, id_T), weight_T, 0)
    return tl.sum(total_T.to(tl.float64), axis=0)


@triton.jit
def _cut(
    row_ptr,
    peak,
    temperature,
    last_score,
    last_id,
    target,
    by_mass,
    NUM_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
):
    """Last token of what is left of a front when its predecessors must weigh less than `target`, above 0."""
    bits: tl.constexpr = tl.int64 if peak.dtype == tl.float64 else tl.int32
    above = _weigh(row_ptr, peak, temperature, last_score, -1, by_mass, NUM_TOKENS, BLOCK, MAX)
    # Scores are at most 0, so that the bits of their magnitudes grow as they fall. What lies above scores of the
    # magnitude `kept` weighs `ahead`, less than the target.
    dropped = tl.abs(last_score).to(bits, bitcast=True)
    kept = tl.where(above < target, dropped, 0)
    ahead = tl.where(above < target, above, 0.0)
    while dropped - kept > 1:
        middle = kept + (dropped - kept) // 2
        middle_score = -middle.to(peak.dtype, bitcast=True)
        above = _weigh(row_ptr, peak, temperature, middle_score, -1, by_mass, NUM_TOKENS, BLOCK, MAX)
        dropped = tl.where(above < target, dropped, middle)
        kept = tl.where(above < target, middle, kept)
        ahead = tl.where(above < target, above, ahead)
    score = -kept.to(peak.dtype, bitcast=True)

    weight = tl.where(by_mass, tl.exp(score), 1).to(tl.float64)
    num_equal = 0
    new_last_id = 0
    for begin in tl.range(0, NUM_TOKENS, BLOCK):
        id_T, score_T = _scores(row_ptr, begin, peak, temperature, NUM_TOKENS, BLOCK, MAX)
        is_equal_T = (score_T == score) & _holds(last_score, last_id, score_T, id_T)
        place_T = num_equal + tl.cumsum(is_equal_T.to(tl.int32), axis=0) - 1
        ahead_T = ahead + place_T * weight
        is_left_T = is_equal_T & (ahead_T < target)
        new_last_id = tl.maximum(new_last_id, tl.max(tl.where(is_left_T, id_T, 0), axis=0))
        num_equal += tl.sum(is_equal_T.to(tl.int32), axis=0)
    return score, new_last_id


@triton.jit
def _gumbel(seed, sample, position, begin, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """The noise of `ops/noise.py` for the tokens of a block."""
    group_G = (begin // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros_G = tl.zeros([BLOCK // 4], tl.uint32)
    position_G, sample_G = zeros_G + position.to(tl.uint32), zeros_G + sample.to(tl.uint32)
    word0_G, word1_G, word2_G, word3_G = tl.philox(seed, position_G, group_G, sample_G, zeros_G)
    word_T = tl.reshape(tl.join(tl.join(word0_G, word2_G), tl.join(word1_G, word3_G)), [BLOCK])
    below_one: tl.constexpr = 1 - (2.0**-53 if dtype == tl.float64 else 2.0**-24)
    uniform_T = tl.minimum((word_T.to(dtype) + 0.5) * 2.0**-32, below_one)
    return -tl.log(-libdevice.log1p(-uniform_T))


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    samples_ptr,
    positions_ptr,
    ids_ptr,
    row_stride,
    NUM_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TINY: tl.constexpr,
    MAX: tl.constexpr,
    MAX_DRAWS: tl.constexpr,
):
    """Program (row). No comparison with NaN holds, so that a NaN is never chosen."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    infinity: tl.constexpr = float("inf")
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0
    temperature = tl.minimum(tl.maximum(temperature, TINY), MAX).to(dtype)
    largest_T = tl.full([BLOCK], -infinity, dtype)
    for begin in tl.range(0, NUM_TOKENS, BLOCK):
        id_T = begin + tl.arange(0, BLOCK)
        logit_T = tl.load(row_ptr + id_T, mask=id_T < NUM_TOKENS, other=-infinity)
        largest_T = tl.where(logit_T > largest_T, logit_T, largest_T)
    peak = tl.minimum(tl.maximum(tl.max(largest_T, axis=0), -MAX), MAX)

    # A token stays if its predecessors weigh less than the target: by their number for top-k, by mass for top-p.
    last_score = tl.full([], -infinity, dtype)
    last_id = NUM_TOKENS
    target = tl.full([], infinity, tl.float64)
    by_mass = False
    if not is_greedy:
        if min_p_ptr is not None:
            last_score = tl.log(tl.load(min_p_ptr + row).to(dtype))
        if top_k_ptr is not None:
            top_k = tl.load(top_k_ptr + row)
            target = tl.where(top_k < NUM_TOKENS, top_k.to(tl.float64), infinity)
        if top_p_ptr is not None:
            top_p = tl.load(top_p_ptr + row)
            if top_p < 1:
                if target < infinity:
                    last_score, last_id = _cut(
                        row_ptr, peak, temperature, last_score, last_id, target, by_mass, NUM_TOKENS, BLOCK, MAX
                    )
                by_mass = True
                target = top_p * _weigh(
                    row_ptr, peak, temperature, last_score, last_id, by_mass, NUM_TOKENS, BLOCK, MAX
                )

    seed, sample, position = tl.load(seeds_ptr + row), tl.load(samples_ptr + row), tl.load(positions_ptr + row)
    num_draws = 0
    token = 0
    is_left = False
    while not is_left:
        if num_draws == MAX_DRAWS:
            last_score, last_id = _cut(
                row_ptr, peak, temperature, last_score, last_id, target, by_mass, NUM_TOKENS, BLOCK, MAX
            )
            target = tl.full([], infinity, tl.float64)
        best_T = tl.full([BLOCK], -infinity, dtype)
        best_id_T = tl.zeros([BLOCK], tl.int32)
        for begin in tl.range(0, NUM_TOKENS, BLOCK):
            if is_greedy:
                id_T = begin + tl.arange(0, BLOCK)
                total_T = tl.load(row_ptr + id_T, mask=id_T < NUM_TOKENS, other=-infinity)
            else:
                id_T, score_T = _scores(row_ptr, begin, peak, temperature, NUM_TOKENS, BLOCK, MAX)
                noise_T = _gumbel(seed, sample, position, begin, BLOCK, dtype)
                total_T = tl.where(_holds(last_score, last_id, score_T, id_T), score_T + noise_T, -infinity)
            is_better_T = total_T > best_T
            best_T = tl.where(is_better_T, total_T, best_T)
            best_id_T = tl.where(is_better_T, id_T, best_id_T)
        is_best_T = best_T == tl.max(best_T, axis=0)
        token = tl.min(tl.where(is_best_T, best_id_T, NUM_TOKENS - 1), axis=0)
        is_left = target == infinity
        if not is_left:
            # If the token falls to a filter, so do all behind it: the next draw is from those ahead of it.
            last_score = _score(tl.load(row_ptr + token), peak, temperature, MAX)
            last_id = token - 1
            ahead = _weigh(row_ptr, peak, temperature, last_score, last_id, by_mass, NUM_TOKENS, BLOCK, MAX)
            is_left = ahead < target
        num_draws += 1
    tl.store(ids_ptr + row, token)


def draw_tokens(logits_BV: Tensor, options: DrawInputs) -> Tensor:
    """As `hybrid_runtime.ops.draw.draw_tokens`, without a sort.

    Two passes over a row without top-k and top-p. Either costs one or two more, and two for each draw that falls to it,
    but at most 45; both together 35 more than top-p alone.
    """
    require_drawable(logits_BV, options)
    return _draw_tokens(logits_BV, *options)


@triton_op("hybrid_runtime::draw_tokens", mutates_args=())
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
    num_rows, num_tokens = logits_BV.shape
    ids_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    if num_rows == 0:
        return ids_B
    options = (temperature_B, min_p_B, top_k_B, top_p_B, seeds_B, sample_indices_B, positions_B)
    info = torch.finfo(logits_BV.dtype)
    block = BLOCK_TOKENS_DOUBLE if logits_BV.dtype == torch.float64 else BLOCK_TOKENS
    wrap_triton(_draw_kernel)[(num_rows,)](
        logits_BV,
        *(None if option is None else option.contiguous() for option in options),
        ids_B,
        logits_BV.stride(0),
        NUM_TOKENS=num_tokens,
        BLOCK=max(4, min(block, triton.next_power_of_2(num_tokens))),
        TINY=info.tiny,
        MAX=info.max,
        MAX_DRAWS=MAX_DRAWS,
        num_warps=NUM_WARPS,
    )
    return ids_B

"""Random numbers that depend on a key and nothing else, written in tensor operations.

Shapes: B rows, V tokens of the vocabulary, G groups of four tokens.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

_WORD = 2**32
_MASK = _WORD - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORDS_PER_COUNTER = 4

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """The counter-based generator Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Words are int64 tensors with values in `0..2**32 - 1`, of shapes that broadcast together; so is the result.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of `word * multiplier`, for a multiplier above 2**31."""
    # The full product does not fit int64; `word * (multiplier - 2**32)` does, and lacks `word` in the high word.
    product = word * (multiplier - _WORD)
    return ((product >> 32) + word) & _MASK, product & _MASK


def gumbel_noise(
    seeds_B: Tensor, sample_indices_B: Tensor, positions_B: Tensor, vocab_size: int, dtype: torch.dtype
) -> Tensor:
    """Independent standard Gumbel values [B, V] in `dtype`, each a function of (seed, sample, position, token id).

    The keys are int64; samples and positions lie in `0..2**32 - 1`. `argmax(log p + noise)` is a draw from p.
    """
    num_groups = -(-vocab_size // _WORDS_PER_COUNTER)
    groups_1G = torch.arange(num_groups, device=seeds_B.device)[None, :]
    seeds_B1 = seeds_B[:, None]
    # The groups go into a word that the first round does not multiply: Inductor keeps `arange` in int32, where such a
    # product overflows.
    words = philox_4x32(
        (positions_B[:, None], groups_1G, sample_indices_B[:, None], torch.zeros_like(seeds_B1)),
        (seeds_B1 & _MASK, (seeds_B1 >> 32) & _MASK),
    )
    words_BV = rearrange(torch.stack(words, dim=-1), "b g w -> b (g w)")[:, :vocab_size]
    # Strictly between 0 and 1. The large values of the noise come from uniforms near 0, where floats are dense.
    uniform_BV = ((words_BV.to(dtype) + 0.5) / _WORD).clamp(max=1 - torch.finfo(dtype).eps / 2)
    return -torch.log(-torch.log1p(-uniform_BV))

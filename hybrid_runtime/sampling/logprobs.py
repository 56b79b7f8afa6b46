"""Log-probabilities of tokens.

Shapes: B rows, V tokens of the vocabulary, N most likely tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GatheredLogprobs(NamedTuple):
    """Of each row: its N most likely tokens, most likely first, and one given token."""

    top_logprobs_BN: Tensor  # float32, or float64 for float64 logits
    top_ids_BN: Tensor  # int64
    token_logprobs_B: Tensor
    token_ranks_B: Tensor  # int64; 1 + the number of tokens that are more likely


def gather_logprobs(logits_BV: Tensor, token_ids_B: Tensor, num_logprobs: int) -> GatheredLogprobs:
    """Log-probabilities under softmax(logits) of `token_ids_B` (int64) and of the `num_logprobs` most likely tokens.

    Serves sampled tokens as well as the tokens of a prompt (B is then its length). `num_logprobs` may be 0.
    """
    logprobs_BV = torch.log_softmax(logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)), dim=-1)
    token_logprobs_B1 = logprobs_BV.gather(-1, token_ids_B[:, None])
    top_logprobs_BN, top_ids_BN = logprobs_BV.topk(num_logprobs, dim=-1)
    token_ranks_B = 1 + (logprobs_BV > token_logprobs_B1).sum(dim=-1)
    return GatheredLogprobs(top_logprobs_BN, top_ids_BN, token_logprobs_B1[:, 0], token_ranks_B)

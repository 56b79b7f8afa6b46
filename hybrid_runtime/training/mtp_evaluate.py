"""How far a head's drafts agree with its target's greedy choices.

Shapes: P texts, L tokens, N positions drafted from, M positions measured, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import KimiLinearForCausalLM

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.mtp import MTP_FILE, load_mtp
from hybrid_runtime.training.mtp_forward import MtpForward, MtpModule
from hybrid_runtime.training.mtp_text import continue_greedily, cut_prompts

BATCH_SIZE = 8
NUM_CANDIDATES = 4
PROMPT_LENGTH, CONTINUATION_LENGTH = 256, 64  # together a multiple of the KDA chunk
MAX_DEPTH = CONTINUATION_LENGTH // 2


@dataclass(frozen=True)
class Acceptance:
    """Of chains drafted greedily from some positions: how often each depth was reached and right."""

    num_positions: int
    num_accepted: tuple[int, ...]  # [depth - 1]: positions whose draft was right up to that depth
    num_candidate_hits: int  # positions where the first right token was among the head's `NUM_CANDIDATES` best

    @property
    def per_depth(self) -> tuple[float, ...]:
        """Of the positions where all shallower tokens were right, the share where this depth's was too."""
        reached = (self.num_positions, *self.num_accepted)
        return tuple(right / max(1, before) for before, right in zip(reached, self.num_accepted, strict=False))

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens of a chain as deep as measured; a round of speculation emits one more."""
        return sum(self.num_accepted) / self.num_positions

    @property
    def candidate_hit_rate(self) -> float:
        return self.num_candidate_hits / self.num_positions

    def plus(self, other: Acceptance) -> Acceptance:
        """Of both sets of positions together."""
        return Acceptance(
            self.num_positions + other.num_positions,
            tuple(a + b for a, b in zip(self.num_accepted, other.num_accepted, strict=True)),
            self.num_candidate_hits + other.num_candidate_hits,
        )


def evaluate_mtp(
    folder: Path, files: Sequence[np.ndarray], *, num_prompts: int, depth: int, seed: int, compiled: bool
) -> tuple[Acceptance, Acceptance]:
    """Acceptance of the head in a checkpoint folder, of chains of `depth` tokens: from the ends of prompts cut from
    `files` (the tokens of each), and from every token of the model's own greedy continuations of these prompts.

    Float32 throughout. Raises ValueError for a depth out of range.
    """
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth must be 1 to {MAX_DEPTH}, not {depth}")
    target, head = load_head(folder)
    forward = MtpForward(target, head, torch.float32, compiled=False)
    prompts_PL = cut_prompts(files, num_prompts, PROMPT_LENGTH, seed)
    texts_PL = continue_greedily(folder, prompts_PL, CONTINUATION_LENGTH, compiled=compiled)
    return (
        acceptance(forward, texts_PL, range(PROMPT_LENGTH - 1, PROMPT_LENGTH), depth),
        acceptance(forward, texts_PL, range(PROMPT_LENGTH, texts_PL.shape[1] - depth), depth),
    )


def load_head(folder: Path) -> tuple[KimiLinearForCausalLM, MtpModule]:
    """The model of a checkpoint folder in float32, and its head as the file has it."""
    target = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    head = load_mtp(folder / MTP_FILE, adapt(target))
    return target, MtpModule(head.spec, head.weights.named_tensors())


@torch.inference_mode()
def acceptance(forward: MtpForward, texts_PL: Tensor, roots: range, depth: int) -> Acceptance:
    """`chain_acceptance` over the texts, batch by batch, on what the training forward makes of them. L must be a
    multiple of the KDA chunk.
    """
    total = Acceptance(0, (0,) * depth, 0)
    for ids_BL in texts_PL.split(BATCH_SIZE):
        total = total.plus(chain_acceptance(forward, ids_BL, *forward.read(ids_BL), roots, depth))
    return total


def chain_acceptance(
    forward: MtpForward, ids_BL: Tensor, hidden_BLD: Tensor, latents: tuple[Tensor, ...], roots: range, depth: int
) -> Acceptance:
    """Drafts chains of `depth` tokens from every root (positions of tokens, at least 1) of the texts `ids_BL`.

    `hidden_BLD`, `latents`: the target's, of all tokens. The tokens behind each root must be the target's greedy
    choices, and the last root have `depth` of them: while a draft is right it then is the text, so that reading the
    text at every step measures exactly the drafts that are right so far.
    """
    assert roots.start >= 1
    assert roots.stop + depth <= ids_BL.shape[1]
    hidden_BND = hidden_BLD[:, : roots.stop - 1]  # a root at p is drafted from the committed tokens 0..p - 1
    right_BM = torch.ones(len(ids_BL), len(roots), dtype=torch.bool)
    num_accepted, num_candidate_hits = [], 0
    for step in range(1, depth + 1):
        hidden_BND = forward.step(ids_BL[:, step : step + roots.stop - 1], hidden_BND, latents)
        logits_BMV = forward.logits(hidden_BND[:, roots.start - 1 :])
        greedy_BM = ids_BL[:, roots.start + step : roots.stop + step]
        if step == 1:
            candidates_BMC = logits_BMV.topk(NUM_CANDIDATES, dim=-1).indices
            num_candidate_hits = int((candidates_BMC == greedy_BM[..., None]).any(-1).sum())
        right_BM &= logits_BMV.argmax(-1) == greedy_BM
        num_accepted.append(int(right_BM.sum()))
    return Acceptance(right_BM.numel(), tuple(num_accepted), num_candidate_hits)

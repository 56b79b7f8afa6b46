"""Two optimizers as one: Muon for the matrices inside the blocks, AdamW for everything else."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

WARMUP_STEPS = 60
FINAL_SCALE = 0.02


def learning_rate_scale(step: int, progress: float) -> float:
    """Factor on the peak learning rates: a linear warm-up over the first steps, times a cosine over the whole budget.

    `progress` is the part of the budget that is spent, 0 to 1.
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SCALE + (1 - FINAL_SCALE) * cosine)


class BlockOptimizer:
    """Muon (Jordan et al. 2024) on block matrices, AdamW on embeddings, head, norms, convolutions and decay gates.

    Muon replaces the gradient of a matrix by the nearest semi-orthogonal one. For the few steps this training can
    afford it learns more per step than AdamW, and on matrices this small it costs a few percent of a step.
    """

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float) -> None:
        matrices, others, vocabulary = [], [], []
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                vocabulary.append(parameter)
            elif parameter.ndim == 2:
                matrices.append(parameter)
            else:
                others.append(parameter)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [{"params": vocabulary, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
                lr=other_lr,
                betas=(0.9, 0.98),
                foreach=True,
            ),
        )
        self._peaks = tuple(optimizer.param_groups[0]["lr"] for optimizer in self._optimizers)

    def step(self, scale: float) -> None:
        """One update at `scale` times the peak learning rates; clears the gradients."""
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of both, for `load_state_dict`."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from `state_dict`'s result."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)

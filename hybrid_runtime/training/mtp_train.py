"""Training of a frozen-KV head against its frozen target: agreement with the target's next token, steps ahead.

Shapes: B batch, L tokens, N positions drafted from, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import KimiLinearForCausalLM

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.mtp import MTP_FILE, load_mtp, save_mtp
from hybrid_runtime.training.data import TokenBatches
from hybrid_runtime.training.mtp_forward import MtpForward, MtpModule, Teacher
from hybrid_runtime.training.mtp_initial import initial_spec, initial_tensors
from hybrid_runtime.training.optimizer import BlockOptimizer, learning_rate_scale


@dataclass(frozen=True)
class MtpOptions:
    """Everything that decides a run. Exactly one of `minutes` and `steps` is the budget; the schedule follows it."""

    folder: Path  # of the target; the head is written beside its weights
    minutes: float | None = None
    steps: int | None = None
    kv_layers: tuple[int, ...] | None = None  # attention layers that the blocks read; None: one block, the last layer
    num_steps: int = 4  # of the drafts that are trained
    depth_decay: float = 0.8  # weight of a step, as a factor on that of the step before
    hard_share: float = 0.5  # of the loss: the target's greedy token; the rest: its whole distribution
    length: int = 512
    batch_size: int = 2
    matrix_lr: float = 6e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    matmul_dtype: torch.dtype = torch.bfloat16
    compiled: bool = True
    save_every_minutes: float = 5.0
    go_on: bool = False  # start from the head in the folder, which decides kv_layers, with a fresh optimizer

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")


class MtpTraining:
    """A head in training: `losses` of a batch, and the file it is saved to."""

    def __init__(self, target: KimiLinearForCausalLM, options: MtpOptions) -> None:
        self.options = options
        adapted = adapt(target)
        if options.go_on:
            loaded = load_mtp(options.folder / MTP_FILE, adapted)
            self.head = MtpModule(loaded.spec, loaded.weights.named_tensors())
        else:
            spec = initial_spec(adapted, options.kv_layers)
            self.head = MtpModule(spec, initial_tensors(spec, adapted, options.seed))
        self.forward = MtpForward(target, self.head, options.matmul_dtype, compiled=options.compiled)
        self._loss = torch.compile(draft_loss, dynamic=False) if options.compiled else draft_loss

    def losses(self, ids_BL: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """The weighted loss of a draft of `num_steps` tokens from every position, and the share of positions at which
        each step's most likely token is the target's, `[num_steps]`.
        """
        options = self.options
        num_positions = ids_BL.shape[1] - options.num_steps
        hidden_BND = teacher.hidden_BLD[:, :num_positions]
        loss, agreements = torch.zeros(()), []
        depth_weights = [options.depth_decay**step for step in range(options.num_steps)]
        for step, depth_weight in enumerate(depth_weights, start=1):
            drafted = slice(step, step + num_positions)
            hidden_BND = self.forward.step(ids_BL[:, drafted], hidden_BND, teacher.latents)
            logits_BNV = self.forward.logits(hidden_BND)
            step_loss, agreement = self._loss(logits_BNV, teacher.logits_BLV[:, drafted], options.hard_share)
            loss = loss + step_loss * (depth_weight / sum(depth_weights))
            agreements.append(agreement)
        return loss, torch.stack(agreements)

    def save(self) -> None:
        save_mtp(self.options.folder / MTP_FILE, self.head.spec, dict(self.head.named_parameters()))


def draft_loss(logits_BNV: Tensor, teacher_BNV: Tensor, hard_share: float) -> tuple[Tensor, Tensor]:
    """Cross entropy with a mixture of the teacher's distribution and its most likely token, less what the teacher's own
    distribution would cost; and the share of positions where both hold the same token for the most likely one.
    """
    log_q = logits_BNV.log_softmax(-1)
    log_p = teacher_BNV.log_softmax(-1)
    best_BN1 = teacher_BNV.argmax(-1, keepdim=True)
    soft = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    hard = -log_q.gather(-1, best_BN1).mean()
    agreement = (logits_BNV.argmax(-1, keepdim=True) == best_BN1).float().mean()
    return hard_share * hard + (1 - hard_share) * soft, agreement


def train_mtp(options: MtpOptions, files: Sequence[np.ndarray], log: Callable[[str], None] = print) -> None:
    """Train a head for the checkpoint in `options.folder` on tokens, and write it there as `MTP_FILE`."""
    torch.manual_seed(options.seed)
    target = KimiLinearForCausalLM.from_pretrained(options.folder, dtype=torch.float32).requires_grad_(False)
    training = MtpTraining(target, options)
    optimizer = BlockOptimizer(training.head, options.matrix_lr, options.other_lr, options.weight_decay)
    batches = TokenBatches(files, options.length, options.batch_size, options.seed)
    log(f"{sum(p.numel() for p in training.head.parameters()):,} parameters")
    _loop(training, optimizer, batches, log)
    training.save()


def _loop(training: MtpTraining, optimizer: BlockOptimizer, batches: TokenBatches, log: Callable[[str], None]) -> None:
    options = training.options
    seconds, last_save, last_time = 0.0, 0.0, None
    recent: list[tuple[float, Tensor]] = []
    for step, (ids_BL, _) in enumerate(batches.starting_at(0)):
        fraction = step / options.steps if options.steps is not None else seconds / (60 * (options.minutes or 0))
        if fraction >= 1:
            return
        loss, agreement = training.losses(ids_BL, training.forward.teach(ids_BL))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.head.parameters(), options.max_grad_norm)
        optimizer.step(learning_rate_scale(step, fraction))
        recent.append((loss.item(), agreement))
        now = time.monotonic()
        seconds += 0.0 if last_time is None else now - last_time  # the first step compiles
        last_time = now
        if (step + 1) % 25 == 0:
            losses, agreements = zip(*recent, strict=True)
            shares = " ".join(f"{share:.3f}" for share in torch.stack(agreements).mean(0).tolist())
            log(f"step {step + 1} {seconds:.0f} s {fraction:.1%} loss {np.mean(losses):.3f} agreement {shares}")
            recent = []
        if seconds - last_save > 60 * options.save_every_minutes:
            training.save()
            last_save = seconds

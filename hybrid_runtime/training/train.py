"""The training loop: a time or step budget, checkpoints on the way, resumable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import KimiLinearForCausalLM, PreTrainedTokenizerFast

from hybrid_runtime.training.corpus import Corpus
from hybrid_runtime.training.data import TokenBatches, encode_files
from hybrid_runtime.training.folder import save_folder
from hybrid_runtime.training.forward import TrainingForward
from hybrid_runtime.training.model import Size, initial_model
from hybrid_runtime.training.optimizer import BlockOptimizer, learning_rate_scale
from hybrid_runtime.training.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Options:
    """Everything that decides a run. Exactly one of `minutes` and `steps` is the budget; the schedule follows it."""

    out: Path
    minutes: float | None = None
    steps: int | None = None
    size: Size = field(default_factory=Size)
    length: int = 512
    batch_size: int = 4
    matrix_lr: float = 6e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    matmul_dtype: torch.dtype = torch.bfloat16
    compiled: bool = True
    save_every_minutes: float = 5.0
    resume: bool = False

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")

    @property
    def state_file(self) -> Path:
        """Where the optimizer's state lies: beside the folder, which holds only what users load."""
        return self.out.with_name(self.out.name + ".training.pt")


@dataclass
class Progress:
    """How far a run is: steps made and seconds trained, over all resumptions.

    The clock does not run during the first step after a start, which compiles.
    """

    step: int = 0
    seconds: float = 0.0

    def fraction(self, options: Options) -> float:
        """Part of the budget that is spent, 0 to 1."""
        if options.steps is not None:
            return self.step / options.steps
        assert options.minutes is not None
        return self.seconds / (60 * options.minutes)


@dataclass(frozen=True)
class Run:
    """A run in flight: what a saved state restores."""

    model: KimiLinearForCausalLM
    tokenizer: PreTrainedTokenizerFast
    optimizer: BlockOptimizer
    progress: Progress

    def save(self, options: Options) -> None:
        """The folder, then the state to resume from; both replaced as a whole."""
        save_folder(self.model, self.tokenizer, options.out)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        scratch = options.state_file.with_suffix(".partial")
        torch.save(state, scratch)
        os.replace(scratch, options.state_file)

    def restore(self, options: Options) -> None:
        """Continue where `save` left off; FileNotFoundError if it never ran."""
        state: dict[str, Any] = torch.load(options.state_file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress.step = state["progress"]["step"]
        self.progress.seconds = state["progress"]["seconds"]


def train(options: Options, corpus: Corpus, log: Callable[[str], None] = print) -> None:
    """Train on `corpus.train` from scratch, or from the saved state, until the budget is spent.

    `options.out` is a usable folder after every save, the last of which is at the end.
    """
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer((file.text for file in corpus.train), options.size.vocab_size)
    batches = TokenBatches(encode_files(tokenizer, corpus.train), options.length, options.batch_size, options.seed)
    model = initial_model(options.size, options.seed)
    optimizer = BlockOptimizer(model, options.matrix_lr, options.other_lr, options.weight_decay)
    run = Run(model, tokenizer, optimizer, Progress())
    if options.resume:
        run.restore(options)
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters, {batches.batches_per_epoch} batches per epoch")
    _loop(run, batches, options, log)
    run.save(options)


def _loop(run: Run, batches: TokenBatches, options: Options, log: Callable[[str], None]) -> None:
    losses_of = TrainingForward(run.model, options.matmul_dtype, compiled=options.compiled)
    parameters = list(run.model.parameters())
    progress = run.progress
    last_time: float | None = None
    last_save, recent = progress.seconds, []
    for ids_BL, targets_BL in batches.starting_at(progress.step):
        fraction = progress.fraction(options)
        if fraction >= 1:
            return
        loss = losses_of(ids_BL, targets_BL).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        run.optimizer.step(learning_rate_scale(progress.step, fraction))
        progress.step += 1
        now = time.monotonic()
        progress.seconds += 0.0 if last_time is None else now - last_time
        last_time = now
        recent.append(loss.item())
        if progress.step % 25 == 0:
            log(f"step {progress.step} {progress.seconds:.0f} s {fraction:.1%} loss {sum(recent) / len(recent):.3f}")
            recent = []
        if progress.seconds - last_save > 60 * options.save_every_minutes:
            run.save(options)
            last_save = progress.seconds

"""Bits per byte of a checkpoint on texts.

Shapes: B batch, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import KimiLinearForCausalLM, PreTrainedTokenizerFast

from hybrid_runtime.training.corpus import SourceFile, num_bytes
from hybrid_runtime.training.data import encode_files
from hybrid_runtime.training.forward import TrainingForward
from hybrid_runtime.training.kda_batched import CHUNK_SIZE
from hybrid_runtime.training.tokenizer import END_OF_TEXT_ID, PAD_ID

BATCH_SIZE = 8


@dataclass(frozen=True)
class BitsPerByte:
    """What a model spends on some texts: every token counts, the first of each text too."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def value(self) -> float:
        """Bits per byte of text."""
        return self.nats / math.log(2) / self.num_bytes


@dataclass(frozen=True)
class _Window:
    """Tokens `begin..end` of a file behind its start token; only targets from `first_scored` on count."""

    ids: np.ndarray
    num_context: int  # leading targets that an earlier window has scored


def _windows(ids: np.ndarray, window: int) -> Iterator[_Window]:
    """Cover a file (its start token included) so that each target is scored once.

    A window holds `window` targets; from the second one on, its first half repeats the last one's second half as
    context. So a token sees everything before it in the first `window` tokens, and at least half a window later on.
    """
    stride = window // 2
    begin, scored = 0, 0
    while scored < len(ids) - 1:
        end = min(begin + window, len(ids) - 1)
        yield _Window(ids[begin : end + 1], scored - begin)
        scored = end
        begin += stride


def _padded_batches(windows: Sequence[_Window]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`(inputs, targets, counts)`, `[B, L]` each: windows of like length together, L a multiple of the KDA chunk."""
    by_length = sorted(windows, key=lambda window: len(window.ids))
    for first in range(0, len(by_length), BATCH_SIZE):
        batch = by_length[first : first + BATCH_SIZE]
        length = math.ceil((len(batch[-1].ids) - 1) / CHUNK_SIZE) * CHUNK_SIZE
        ids = torch.full((len(batch), length + 1), PAD_ID, dtype=torch.int64)
        counts_BL = torch.zeros(len(batch), length, dtype=torch.bool)
        for row, window in enumerate(batch):
            ids[row, : len(window.ids)] = torch.from_numpy(window.ids.astype(np.int64))
            counts_BL[row, window.num_context : len(window.ids) - 1] = True
        yield ids[:, :-1], ids[:, 1:], counts_BL


def bits_per_byte(
    model: KimiLinearForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[SourceFile],
    *,
    window: int = 512,
    matmul_dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] = lambda line: None,
) -> BitsPerByte:
    """Code length of `files` under `model`, each from a fresh state behind an end-of-text token.

    Files longer than `window` tokens are read in windows that overlap by half, each from a fresh state again.
    """
    losses_of = TrainingForward(model, matmul_dtype, compiled=False)
    start = np.asarray([END_OF_TEXT_ID], dtype=np.uint16)
    encoded = encode_files(tokenizer, files)
    windows = [piece for ids in encoded for piece in _windows(np.concatenate([start, ids]), window)]
    nats, done = 0.0, 0
    with torch.inference_mode():
        for inputs_BL, targets_BL, counts_BL in _padded_batches(windows):
            nats += losses_of(inputs_BL, targets_BL)[counts_BL].sum(dtype=torch.float64).item()
            done += len(inputs_BL)
            progress(f"{done} of {len(windows)} windows")
    return BitsPerByte(nats, sum(map(len, encoded)), num_bytes(files))

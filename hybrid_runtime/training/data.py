"""Token streams for training: files one behind another, cut into equally long pieces in a seeded order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hybrid_runtime.training.corpus import SourceFile
from hybrid_runtime.training.tokenizer import END_OF_TEXT_ID


def encode_files(tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> list[np.ndarray]:
    """The tokens of each file, uint16, without any special token."""
    encoded = tokenizer.backend_tokenizer.encode_batch([file.text for file in files], add_special_tokens=False)
    return [np.asarray(encoding.ids, dtype=np.uint16) for encoding in encoded]


class TokenBatches:
    """Endless batches of training pieces; batch number n depends only on the files, the sizes, the seed and n.

    In every epoch the files are shuffled and laid one behind another, each behind an end-of-text token; the stream is
    cut into pieces of `length` targets, and the pieces are shuffled. What is left over at the end of an epoch, less
    than one batch, is dropped.
    """

    def __init__(self, files: Sequence[np.ndarray], length: int, batch_size: int, seed: int) -> None:
        self._files = files
        self._length = length
        self._batch_size = batch_size
        self._seed = seed
        num_tokens = sum(len(file) + 1 for file in files)
        self.batches_per_epoch = (num_tokens - 1) // length // batch_size
        if self.batches_per_epoch < 1:
            raise ValueError(f"{num_tokens} tokens make no batch of {batch_size} x {length}")

    def starting_at(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`(inputs, targets)`, int64 `[B, L]` each, of batch `step` and all that follow."""
        while True:
            epoch, first = divmod(step, self.batches_per_epoch)
            pieces = self._shuffled_pieces(epoch)
            for index in range(first, self.batches_per_epoch):
                batch = pieces[index * self._batch_size : (index + 1) * self._batch_size]
                ids = torch.from_numpy(batch.astype(np.int64))
                yield ids[:, :-1], ids[:, 1:]
                step += 1

    def _shuffled_pieces(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, epoch])
        separator = np.asarray([END_OF_TEXT_ID], dtype=np.uint16)
        parts = [part for index in rng.permutation(len(self._files)) for part in (separator, self._files[index])]
        stream = np.concatenate(parts)
        # Neighbouring pieces share one token: the last target of one is the first input of the next.
        pieces = np.lib.stride_tricks.sliding_window_view(stream, self._length + 1)[:: self._length]
        order = rng.permutation(len(pieces))[: self.batches_per_epoch * self._batch_size]
        return pieces[order]

"""A small byte-level tokenizer, trained on first use: characters of several tokens, without a file or a download."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the cat sat on the mat and the hat", "über Äpfel, naïve façade", "敏捷的狐狸 🚀🚀 と犬"] * 4
EOS = 0


@functools.cache
def tokenizer() -> Any:
    """A byte-level BPE with few merges: a fox takes three tokens, a rocket one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")


def encode(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])

"""A byte-level BPE tokenizer for source code, trained with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Stands before every file, and so also ends the one before it.
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TEXT_ID = 0
PAD_ID = 1

# Where merges must not cross. Words may take one character of punctuation or a space in front (`.append`, ` self`);
# punctuation takes the line end and the indentation behind it (`):\n        `), which code repeats endlessly.
# The alternatives cover every string, and none drops a character.
PIECE_PATTERN = (
    r"[^\s\p{L}\p{N}]?\p{L}+"
    r"| ?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:\r?\n[ \t]*)?"
    r"|(?:\r?\n)+[ \t]*"
    r"|[ \t]+(?=\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` tokens from `texts`: two special tokens, the 256 bytes and the most frequent merges.

    Every byte is a token, so any text can be encoded and decodes to itself exactly.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size={vocab_size} has no room for 2 special tokens and 256 bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )

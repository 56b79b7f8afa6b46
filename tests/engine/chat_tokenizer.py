"""A tokenizer with a chat template, small enough for the vocabulary of every model here."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.engine.helpers import VOCAB_SIZE
from tests.unit.split_tokenizers import LLAMA3

SYSTEM = "You are a helpful assistant. Answer briefly, it'll do; and count 1234 sheep if you can't."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [SYSTEM, "user\nassistant\nsystem\n", "the cat sat on the mat and the hat", "0123456789 \n\n ' . <|_>"] * 4


@functools.cache
def chat_tokenizer(*, with_start_token: bool = False, template: str | None = TEMPLATE) -> Any:
    """Llama-3's word pattern over some ASCII; shared by all tests, which must not change it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False)
    )
    if with_start_token:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=template)


def ids_of(text: str, **options: bool) -> list[int]:
    return list(chat_tokenizer(**options)(text)["input_ids"])


def messages_of(*contents: str) -> list[dict[str, str]]:
    """A system message, then the user and the assistant by turns."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]

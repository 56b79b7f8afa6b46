"""The bundled checkpoint is an ordinary transformers folder, small, and knows Python better than xz does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid_runtime
from hybrid_runtime.training.corpus import SourceFile, is_held_out, stdlib_root
from hybrid_runtime.training.data import encode_files

FOLDER = Path(hybrid_runtime.__file__).parent / "checkpoints" / "tiny"
MAX_FOLDER_BYTES = 12_000_000
HELD_OUT_FILE = "asyncio/queues.py"
SNIPPET_CHARACTERS = 3000
# 0.921 measured for Python 3.11; the file differs a little between versions
MAX_BITS_PER_BYTE = 1.05


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_FOLDER_BYTES


def test_the_model_mixes_kda_and_attention_over_dense_layers(model):
    config = model.config
    assert config.model_type == "kimi_linear"
    assert set(config.mlp_layer_types) == {"dense"}
    assert set(config.layer_types) == {"linear_attention", "full_attention"}


def test_it_loads_in_float32_and_the_decay_parameters_are_stored_so(model):
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with safe_open(FOLDER / "model.safetensors", "pt") as tensors:
        dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert {dtype for name, dtype in dtypes.items() if name.endswith(("dt_bias", "A_log"))} == {"F32"}
    assert set(dtypes.values()) == {"F32", "BF16"}
    assert set(dtypes) == set(model.state_dict())


@given(text=st.text())
@example(text="\tif x:\r\n\t\treturn\r\n\r\n   \n \t ")
@example(text="naïve 漢字 🙂 \u200d\u0301 \x00\x7f \u2028 ﬁ")
@example(text="def f(a , b) :\n    return a  !=  b . c 's")
@example(text=" leading and trailing ")
def test_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_every_byte_is_a_token(tokenizer):
    for character in map(chr, [*range(256), 0x7FF, 0x800, 0xFFFF, 0x10FFFF]):
        assert tokenizer.decode(tokenizer(character, add_special_tokens=False).input_ids) == character


def test_special_tokens_are_those_of_the_config(tokenizer, model):
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == model.config.bos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_held_out_code_costs_few_bits(tokenizer, model):
    """transformers' own forward on the head of a file that training never saw; every token of it counts."""
    assert is_held_out(HELD_OUT_FILE)
    text = (stdlib_root() / HELD_OUT_FILE).read_bytes().decode()[:SNIPPET_CHARACTERS]
    (encoded,) = encode_files(tokenizer, [SourceFile(HELD_OUT_FILE, text)])
    ids = torch.tensor([[tokenizer.bos_token_id, *encoded.tolist()]])
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits
    nats = functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
    assert nats / math.log(2) / len(text.encode()) < MAX_BITS_PER_BYTE


def test_it_writes_python(tokenizer, model):
    """Greedy continuation of a line that the language all but determines."""
    prompt = tokenizer("import os\nimport sys\n\n\ndef main", add_special_tokens=False).input_ids
    ids = torch.tensor([[tokenizer.bos_token_id, *prompt]])
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
    assert "def main(" in text

"""The loop and the measurement, on a model and a corpus small enough to train in a second."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from transformers import KimiLinearForCausalLM, PreTrainedTokenizerFast

from hybrid_runtime.training.corpus import Corpus, SourceFile
from hybrid_runtime.training.evaluate import bits_per_byte
from hybrid_runtime.training.model import Size, initial_model
from hybrid_runtime.training.optimizer import learning_rate_scale
from hybrid_runtime.training.tokenizer import train_tokenizer
from hybrid_runtime.training.train import Options, train

SIZE = Size(hidden_size=32, intermediate_size=32, num_heads=2, vocab_size=300)
FILES = tuple(
    SourceFile(f"m{index}.py", "".join(f"def f{index + line}(x):\n    return x + {line}\n\n\n" for line in range(12)))
    for index in range(20)
)
CORPUS = Corpus(train=FILES[:18], held_out=FILES[18:])


def options_for(out, **changes):
    defaults = {
        "steps": 40,
        "size": SIZE,
        "length": 32,
        "batch_size": 2,
        "compiled": False,
        "other_lr": 0.03,
        "matrix_lr": 0.03,
    }
    return Options(out=out, matmul_dtype=torch.float32, **{**defaults, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of an uninterrupted run, and the lines that it logged."""
    out = tmp_path_factory.mktemp("trained") / "model"
    lines: list[str] = []
    train(options_for(out), CORPUS, lines.append)
    return out, lines


def test_the_folder_loads_and_has_learnt(trained):
    folder, _ = trained
    model, tokenizer = KimiLinearForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    fresh = initial_model(SIZE, seed=0)
    assert (
        bits_per_byte(model, tokenizer, CORPUS.held_out).value
        < 0.6 * bits_per_byte(fresh, tokenizer, CORPUS.held_out).value
    )


def test_an_interrupted_run_continues_bit_for_bit(trained, tmp_path):
    folder, _ = trained
    out = tmp_path / "model"

    def interrupt(line):
        if line.startswith("step 25 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(options_for(out, save_every_minutes=0.0), CORPUS, interrupt)
    KimiLinearForCausalLM.from_pretrained(out)
    train(options_for(out, resume=True), CORPUS, lambda line: None)
    whole, resumed = (load_file(path / "model.safetensors") for path in (folder, out))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)


def test_a_run_leaves_nothing_but_the_folder_and_the_state(trained):
    folder, _ = trained
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "model.training.pt"]


def test_a_time_budget_ends_the_run(tmp_path):
    lines: list[str] = []
    train(options_for(tmp_path / "model", steps=None, minutes=0.01), CORPUS, lines.append)
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("budget", [{"steps": None}, {"minutes": 1.0}])
def test_a_run_has_exactly_one_budget(tmp_path, budget):
    with pytest.raises(ValueError, match="either minutes or steps"):
        options_for(tmp_path, **budget)


def test_the_learning_rate_warms_up_and_falls():
    scales = [learning_rate_scale(step, step / 1000) for step in range(1001)]
    assert scales[0] < 0.05
    peak = scales.index(max(scales))
    assert scales[: peak + 1] == sorted(scales[: peak + 1])
    assert scales[peak:] == sorted(scales[peak:], reverse=True)
    assert scales[-1] == pytest.approx(0.02)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([file.text for file in CORPUS.train], SIZE.vocab_size)


@pytest.fixture(scope="module")
def uniform_model():
    """Every token costs log(vocabulary), whatever stands before it."""
    model = initial_model(SIZE, seed=0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


@given(texts=st.lists(st.text("abc \n", min_size=1, max_size=120), min_size=1, max_size=4), half=st.integers(1, 20))
def test_every_token_is_charged_once(tokenizer, uniform_model, texts, half):
    files = [SourceFile(f"{index}.py", text) for index, text in enumerate(texts)]
    result = bits_per_byte(uniform_model, tokenizer, files, window=2 * half)
    num_tokens = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    assert result.num_tokens == num_tokens
    assert result.nats == pytest.approx(num_tokens * math.log(SIZE.vocab_size), rel=1e-5)
    assert result.num_bytes == sum(map(len, texts))


def test_a_file_that_fits_the_window_costs_what_transformers_says(trained):
    folder, _ = trained
    model, tokenizer = KimiLinearForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    file = CORPUS.held_out[0]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(file.text, add_special_tokens=False).input_ids]])
    with torch.inference_mode():
        expected = functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
    assert bits_per_byte(model, tokenizer, [file], window=1024).nats == pytest.approx(expected, rel=1e-4)
    assert bits_per_byte(model, tokenizer, [file], window=64).nats != pytest.approx(expected, rel=1e-4)

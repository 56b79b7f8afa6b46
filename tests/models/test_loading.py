"""Loading from memory, from a folder, and the bundled checkpoint. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.models import loading
from hybrid_runtime.models.loading import load_model
from tests.models.test_adapters import tensors_of
from tests.parity.driver import Driver, Prompt
from tests.parity.zoo import CASES


@pytest.fixture
def kimi() -> PreTrainedModel:
    return next(case for case in CASES if case.name == "kimi").build()


def logits(loaded: loading.LoadedModel) -> torch.Tensor:
    driver = Driver(loaded.hybrid_model, max_requests=1, max_len=16, num_state_slots=1)
    return driver.prefill(Prompt(driver.start(), [3, 1, 4, 1, 5]))[0]


def test_a_model_in_memory_is_shared(kimi: PreTrainedModel) -> None:
    loaded = load_model(kimi, torch.float32, "cpu")
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == (2,)
    assert loaded.name == "kimi_linear"
    assert loaded.hybrid_model.weights.embedding_VD is kimi.model.embed_tokens.weight


def test_another_dtype_leaves_the_callers_model_alone(kimi: PreTrainedModel) -> None:
    loaded = load_model(kimi, torch.bfloat16)
    assert loaded.hybrid_model.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in kimi.parameters()} == {torch.float32}
    kept = [tensor for tensor in tensors_of(loaded.hybrid_model.weights) if tensor.dtype == torch.float32]
    assert kept, "time step biases and router weights stay in float32, as transformers keeps them"
    assert logits(loaded).dtype == torch.float32
    assert logits(load_model(kimi, torch.float64)).dtype == torch.float64


def test_a_folder_gives_the_model_that_was_saved(kimi: PreTrainedModel, tmp_path: Path) -> None:
    kimi.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer is None
    assert loaded.name == str(tmp_path)
    assert torch.equal(logits(loaded), logits(load_model(kimi)))
    wide = load_model(str(tmp_path), torch.float64)
    assert {tensor.dtype for tensor in tensors_of(wide.hybrid_model.weights)} == {torch.float64}


def test_the_bundled_name_leads_to_its_folder(
    kimi: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "TINY_CHECKPOINT", tmp_path)
    with pytest.raises(FileNotFoundError, match="bundled checkpoint is missing"):
        load_model("tiny")
    kimi.save_pretrained(tmp_path)
    assert load_model("tiny").name == "tiny"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_an_unknown_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*KimiLinearForCausalLM"):
        load_model(tmp_path)

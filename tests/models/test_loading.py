"""Loading from memory, from a folder, and the bundled checkpoint. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM, PreTrainedModel

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


@pytest.mark.parametrize("as_type", [Path, str])
def test_a_missing_folder_is_named(tmp_path: Path, as_type: type) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(as_type(tmp_path / "nowhere"))


def test_a_checkpoint_with_missing_weights_is_refused(kimi: PreTrainedModel, tmp_path: Path) -> None:
    """transformers would draw them at random and say so in a table."""
    kimi.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing .*layers\.1\.self_attn\.o_proj\.weight"):
        load_model(tmp_path)


def test_a_tokenizer_that_is_not_needed_is_not_loaded(kimi: PreTrainedModel, tmp_path: Path) -> None:
    kimi.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("not a tokenizer")
    assert load_model(tmp_path, needs_tokenizer=False).tokenizer is None


class Wrapped(nn.Linear):
    """Stands for what adapters and quantisation put in place of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_a_module_that_is_not_what_it_seems_is_refused(kimi: PreTrainedModel) -> None:
    attention = kimi.model.layers[2].self_attn
    plain = attention.o_proj
    attention.o_proj = Wrapped(plain.in_features, plain.out_features)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.2\.self_attn\.o_proj is a .*Wrapped"):
        load_model(kimi)
    attention.o_proj = plain
    handle = plain.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.2\.self_attn\.o_proj has hooks"):
        load_model(kimi)
    handle.remove()
    load_model(kimi)
    parametrizations.weight_norm(plain)
    with pytest.raises(UnsupportedModelError, match=r"o_proj is a .*Parametrized"):
        load_model(kimi)


def test_a_model_of_mixed_dtypes_is_converted_whole(kimi: PreTrainedModel) -> None:
    kimi.model.embed_tokens.to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert logits(load_model(kimi, dtype)).isfinite().all()
    assert logits(load_model(kimi)).isfinite().all()


def test_float64_means_everything(kimi: PreTrainedModel, tmp_path: Path) -> None:
    """Buffers too: a rotary frequency left in float32 would cost half of the digits."""
    qwen = next(case for case in CASES if case.name == "qwen").build()
    qwen.save_pretrained(tmp_path)
    in_memory = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(load_model(in_memory, torch.float64)), logits(load_model(qwen, torch.float64)))


def test_half_precision_is_refused_and_the_training_mode_is_kept(kimi: PreTrainedModel) -> None:
    kimi.train()
    load_model(kimi)
    assert kimi.training
    with pytest.raises(ValueError, match=r"dtype must be one of float32, bfloat16, float64, not torch\.float16"):
        load_model(kimi.half())


@pytest.mark.parametrize(
    ("eos", "expected"),
    [([2, 211, -1, 5], (2, 5)), (torch.tensor([7]), (7,)), (torch.tensor(7), (7,)), (10**9, ())],
)
def test_end_of_text_ids_are_tokens(kimi: PreTrainedModel, eos: object, expected: tuple[int, ...]) -> None:
    kimi.generation_config.eos_token_id = eos
    assert load_model(kimi).eos_token_ids == expected


def test_attention_that_is_not_causal_is_refused(kimi: PreTrainedModel) -> None:
    kimi.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is_causal=False"):
        load_model(kimi)


def test_an_unknown_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*KimiLinearForCausalLM"):
        load_model(tmp_path)


def test_hooks_that_transformers_leaves_behind_are_no_reason_to_refuse(kimi: PreTrainedModel) -> None:
    expected = logits(load_model(kimi))
    with torch.no_grad():
        kimi(torch.tensor([[3, 1, 4]]), output_hidden_states=True)
    kimi.enable_input_require_grads()
    assert any(module._forward_hooks for module in kimi.modules())
    assert torch.equal(logits(load_model(kimi)), expected)

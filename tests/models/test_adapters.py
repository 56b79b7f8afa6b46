"""Adapters share every weight of a transformers model, and refuse what they do not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.models.adapters import adapt, supported_architectures
from tests.parity.zoo import CASES, Case

cases = pytest.mark.parametrize("case", CASES, ids=str)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def tensors_of(weights: object) -> Iterator[Tensor]:
    """All tensors in a tree of dataclasses, tuples and mappings."""
    if isinstance(weights, Tensor):
        yield weights
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from tensors_of(getattr(weights, field.name))
    elif isinstance(weights, Mapping):
        for value in weights.values():
            yield from tensors_of(value)
    elif isinstance(weights, tuple):
        for value in weights:
            yield from tensors_of(value)


@cases
def test_every_parameter_is_shared_and_used(case: Case) -> None:
    model = case.build()
    hybrid = adapt(model)
    ours = {tensor.data_ptr() for tensor in tensors_of(hybrid.weights)}
    parameters = {tensor.data_ptr() for tensor in model.parameters()}
    buffers = {tensor.data_ptr() for tensor in model.buffers()}
    assert parameters <= ours, "a parameter of the model is not used"
    assert ours <= parameters | buffers, "a weight was copied"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kimi", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("granite-nope", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("granite-nope", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("kimi", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        (
            "granite-moe-rope",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
    ],
)
def test_an_unknown_option_is_refused_by_name(name: str, options: dict[str, object], message: str) -> None:
    case = case_named(name)
    model = dataclasses.replace(case, options={**case.options, **options}).build()
    with pytest.raises(UnsupportedModelError, match=message):
        adapt(model)


def test_an_unknown_layer_type_is_refused_by_name() -> None:
    model = case_named("kimi").build()
    model.config.layer_types = ["sliding_attention", *model.config.layer_types[1:]]
    with pytest.raises(UnsupportedModelError, match=r"layer_types\[0\]='sliding_attention'"):
        adapt(model)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4
    )
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM") as error:
        adapt(LlamaForCausalLM(config))
    assert all(name in str(error.value) for name in supported_architectures())


def test_memory_is_declared_for_each_depth_and_dtype() -> None:
    model = adapt(case_named("kimi").build())
    (latent,) = model.kv_layers(torch.bfloat16)
    assert latent["latent"].shape == (14 + 6,)
    assert latent["latent"].dtype == torch.bfloat16
    states = model.state_layers()
    assert len(states) == 3
    assert states[0]["kda"].shape == (3, 8, 8)
    assert states[0]["kda"].dtype == torch.float32
    assert states[0]["conv"].shape == (3, 3 * 3 * 8)
    assert model.state_layers(torch.float64)[0]["kda"].dtype == torch.float64


def test_models_of_one_kind_of_layer_need_one_pool() -> None:
    assert adapt(case_named("kimi-dense-kda-only").build()).kv_layers() == ()
    assert adapt(case_named("granite-attention-only").build()).state_layers() == ()


def test_end_of_text_ids_come_from_the_generation_config() -> None:
    model = case_named("qwen").build()
    assert adapt(model).spec.eos_token_ids == (2,)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [5, 7]
    assert adapt(model).spec.eos_token_ids == (5, 7)

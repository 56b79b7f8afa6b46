"""What compiled code must not take for granted: which weights are one, what they were, dtypes of pools, modes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime
from tests.engine.helpers import greedy, tokens_of
from tests.parity.zoo import CASES

PROMPTS = [[5, 6, 7, 8, 9], [60, 3, 41]]
POOLS: dict[str, Any] = {"num_kv_slots": 120, "num_state_slots": 8, "max_num_seqs": 4, "max_model_len": 50}


def attention_model(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Two attention layers of one spec."""
    model: Any = next(case for case in CASES if case.name == "granite-attention-only").build()
    return model.to(dtype)


def tokens(model: PreTrainedModel, compile_mode: str, **options: Any) -> list[tuple[int, ...]]:
    with HybridRuntime(model, compile=compile_mode, **{**POOLS, **options}) as rt:
        return tokens_of(rt.generate(PROMPTS, greedy(12)))


def share_key_and_value(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight


def share_norms(model: Any) -> None:
    layer = model.model.layers[0]
    layer.post_attention_layernorm.weight = layer.input_layernorm.weight


def give_one_layer_a_bias(model: Any) -> None:
    linear = model.model.layers[1].self_attn.q_proj
    linear.bias = torch.nn.Parameter(torch.linspace(-1, 1, linear.out_features, dtype=linear.weight.dtype))


@pytest.mark.parametrize("change", [share_key_and_value, share_norms, give_one_layer_a_bias])
def test_layers_of_one_spec_may_differ_in_what_they_share_and_have(change: Callable[[Any], None]) -> None:
    """And the model without the change, whose layers have the same layouts, does not get their code."""
    plain = attention_model()
    changed = copy.deepcopy(plain)
    change(changed)
    for model in (changed, plain):
        assert tokens(model, "auto") == tokens(model, "off")


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "float64"), ("float64", "float32")])
def test_keys_and_values_may_have_another_width(dtype: str, kv_dtype: str) -> None:
    model = attention_model()
    options = {"dtype": dtype, "kv_dtype": kv_dtype}
    assert tokens(model, "auto", **options) == tokens(model, "off", **options)


def test_weights_that_were_changed_in_place_are_used_after_a_reset() -> None:
    """bfloat16, whose matrices compiled steps may keep in a layout of their own."""
    model = attention_model(torch.bfloat16)
    before = tokens(model, "auto")
    with HybridRuntime(model, compile="auto", **POOLS) as rt:
        assert tokens_of(rt.generate(PROMPTS, greedy(12))) == before
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0) if parameter.dim() == 2 else parameter)
        rt.reset_prefix_cache()
        after = tokens_of(rt.generate(PROMPTS, greedy(12)))
    assert after == tokens(model, "auto") != before


@pytest.mark.parametrize(
    "mode", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode], ids=["autocast", "inference"]
)
def test_a_runtime_made_in_another_mode_is_the_same(mode: Callable[[], Any]) -> None:
    """Nor does one made afterwards, outside, find code that was compiled for the mode."""
    model = attention_model(torch.float32)
    expected = tokens(model, "off")
    with mode():
        assert tokens(model, "auto", seed=1) == expected
    assert tokens(model, "auto") == expected


def test_closing_gives_packed_weights_back() -> None:
    rt = HybridRuntime(attention_model(torch.bfloat16), compile="auto", **POOLS)
    head = rt._engine.runner.model.weights.lm_head
    references = [weakref.ref(tensor) for tensor in (head.packed,) if tensor is not None]
    del head
    rt.close()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert not hasattr(rt._engine.runner, "steps")

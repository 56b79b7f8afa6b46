"""What the three rollbacks hold and move at the sizes of published models, by the runtime's own arithmetic.

A model of one recurrent layer is built without memory for its weights and asked what its verifies note down.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from hybrid_runtime.memory.pools import bytes_per_slot
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.rollback import ROLLBACKS

STATE_DTYPE = torch.float32  # the default of `RuntimeConfig.state_dtype`

_ONE_LAYER: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

_CONFIGS: Mapping[str, PretrainedConfig] = {
    "KDA, Kimi-Linear": KimiLinearConfig(
        **_ONE_LAYER,
        linear_num_heads=32,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
        mlp_layer_types=["dense"],
    ),
    "GDN, Qwen3-Next": Qwen3NextConfig(
        **_ONE_LAYER,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mlp_only_layers=[0],
    ),
    "Mamba-2, Nemotron-H": GraniteMoeHybridConfig(  # the sizes are Nemotron-H's; no config of its own is needed
        **_ONE_LAYER,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_n_groups=8,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_expand=128,
        num_local_experts=0,
        num_experts_per_tok=0,
    ),
}

LAYERS = tuple(_CONFIGS)
"""The recurrent layers by name: 32 x 128 x 128, 32 x 128 x 128 and 128 x 64 x 128 numbers of state."""


def state_bytes(layer: str, *, num_layers: int = 1) -> int:
    """Bytes of one state slot: conv windows in bfloat16, states in float32."""
    return num_layers * bytes_per_slot(_model(layer).state_layers(STATE_DTYPE))


def record_plan(layer: str, rollback: str, *, num_nodes: int, num_layers: int = 32, num_rows: int = 32) -> RecordPlan:
    """What verifies of trees of `num_nodes` nodes, the root included, note down for `num_rows` requests.

    A runtime holds that all the time, and one padding row more: the tensors are those that its compiled steps name.
    """
    way = ROLLBACKS[rollback]
    [of_layer] = _model(layer).record_layers(num_nodes, way, STATE_DTYPE)
    return RecordPlan((of_layer,) * num_layers, num_rows, way.shared_records)


def states_moved(rollback: str, num_nodes: int) -> int:
    """How many states one round reads or writes at least, per layer and row.

    fold: reads the state to verify, reads and writes it to commit. The other two also write the state behind every
    node, and the commit reads one and writes one: `snapshot` the accepted node's, `replay` the one that it advances.
    (A node whose parent's state has to come from memory again reads one more: up to `2 * num_nodes + 2` in all. A
    replay that goes token by token reads and writes one for each.)
    """
    return 3 if rollback == "fold" else 3 + num_nodes


@cache
def _model(layer: str) -> HybridModel:
    return layer_model(layer, torch.device("meta"))


def layer_model(layer: str, device: torch.device) -> HybridModel:
    """A model of one recurrent layer with random weights in bfloat16, and next to no hidden size."""
    with device:
        return adapt(AutoModelForCausalLM.from_config(_CONFIGS[layer], dtype=torch.bfloat16))

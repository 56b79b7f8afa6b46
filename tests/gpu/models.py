"""Small random models without experts: in bfloat16, a token that goes to another expert says nothing about a kernel."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from tests.engine.helpers import MIXER_KINDS
from tests.parity.zoo import CASES, Case

_DENSE: dict[str, dict[str, Any]] = {
    "kda": {"mlp_layer_types": ["dense"] * 4},
    "mamba2": {"num_local_experts": 0, "num_experts_per_tok": 0},
    "gdn": {"mlp_only_layers": [0, 1, 2, 3, 4]},
}


def dense_model(kind: str) -> PreTrainedModel:
    """The model of a mixer kind in `tests/engine/helpers.py`, with plain feed-forwards."""
    case = next(case for case in CASES if case.name == MIXER_KINDS[kind])
    return Case(case.name, case.config_class, {**case.options, **_DENSE[kind]}).build()

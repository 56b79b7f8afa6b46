"""Adapters: one file per transformers architecture, each a function from a model in memory to spec and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import PreTrainedModel

from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.models.adapters import granitemoehybrid, kimi_linear, qwen3_next
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.spec import ModelSpec
from hybrid_runtime.models.weights import ModelWeights

__all__ = ["adapt", "supported_architectures"]

_ADAPTERS: Mapping[str, Callable[[PreTrainedModel], tuple[ModelSpec, ModelWeights]]] = {
    "GraniteMoeHybridForCausalLM": granitemoehybrid.adapt,
    "KimiLinearForCausalLM": kimi_linear.adapt,
    "Qwen3NextForCausalLM": qwen3_next.adapt,
}


def supported_architectures() -> tuple[str, ...]:
    """Class names of the transformers models that have an adapter."""
    return tuple(sorted(_ADAPTERS))


def adapt(model: PreTrainedModel) -> HybridModel:
    """A model that shares the parameters of `model`: later changes of them change both.

    Raises UnsupportedModelError for an architecture without adapter, or an option of its config that has none.
    """
    architecture = type(model).__name__
    if architecture not in _ADAPTERS:
        raise UnsupportedModelError(
            f"no adapter for the architecture {architecture}; supported: {', '.join(supported_architectures())}"
        )
    return HybridModel(*_ADAPTERS[architecture](model))

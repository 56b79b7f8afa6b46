"""Adapters: one file per transformers architecture, each a function from a model in memory to spec and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
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
    """A model that shares the parameters of `model`: what is changed in place there changes here too.

    States that a prefix cache holds then belong to the old weights: empty it after such a change. A parameter that is
    replaced by another tensor is not followed.

    Raises UnsupportedModelError for an architecture without adapter, an option of its config that has none, or a model
    whose modules have been wrapped, replaced or hooked (adapters, quantisation, offloading): only the weights are used
    here, so what such a module does beside them would be lost in silence.
    """
    architecture = type(model).__name__
    if architecture not in _ADAPTERS:
        raise UnsupportedModelError(
            f"no adapter for the architecture {architecture}; supported: {', '.join(supported_architectures())}"
        )
    for path, module in model.named_modules():
        _require_plain(path or architecture, module)
    if getattr(model.config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{architecture} with is_causal=False: only causal attention is supported")
    return HybridModel(*_ADAPTERS[architecture](model))


def _require_plain(path: str, module: nn.Module) -> None:
    """Raises UnsupportedModelError unless a module is one of torch's or transformers' own and does nothing else."""
    kind = type(module)
    if not kind.__module__.startswith(("torch.nn.modules.", "transformers.")):
        raise UnsupportedModelError(f"module {path} is a {kind.__module__}.{kind.__qualname__}: merge or remove it")
    # transformers leaves hooks of its own that only look: to collect hidden states, to keep inputs differentiable.
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    is_hooked = any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
    if is_hooked or hasattr(module, "_hf_hook"):
        raise UnsupportedModelError(f"module {path} has hooks, which would be ignored: remove them")

"""A runtime for hybrid language models: attention mixed with recurrent layers, one prefix cache for both.

from hybrid_runtime import HybridRuntime, SamplingParams

with HybridRuntime("tiny") as rt:
    print(rt.generate("def add(a, b):", SamplingParams(max_tokens=32, temperature=0.0))[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_runtime.config import RuntimeConfig
    from hybrid_runtime.errors import PoolExhausted, UnsupportedModelError
    from hybrid_runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, RuntimeStats
    from hybrid_runtime.runtime import HybridRuntime
    from hybrid_runtime.sampling_params import SamplingParams
    from hybrid_runtime.speculative_config import SpeculativeConfig

__version__ = "0.1.0"

_HOMES = {
    "CompletionOutput": "outputs",
    "HybridRuntime": "runtime",
    "Logprob": "outputs",
    "PoolExhausted": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RuntimeConfig": "config",
    "RuntimeStats": "outputs",
    "SamplingParams": "sampling_params",
    "SpeculativeConfig": "speculative_config",
    "UnsupportedModelError": "errors",
}

__all__ = [
    "CompletionOutput",
    "HybridRuntime",
    "Logprob",
    "PoolExhausted",
    "RequestMetrics",
    "RequestOutput",
    "RuntimeConfig",
    "RuntimeStats",
    "SamplingParams",
    "SpeculativeConfig",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that the parts without torch can be used without it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

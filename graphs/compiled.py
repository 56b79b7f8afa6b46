"""Functions compiled ahead of their first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class CompiledFunction:
    """A function compiled by Inductor as one graph, for arguments like the examples: nothing is compiled afterwards.

    Sizes that `mark_dynamic` marked may differ from call to call, down to 1. Whatever else the function depends on must
    be as in the examples; a call does not look at it, which saves some 60 us of guards a call. `require_same` looks.

    Compiling raises what torch.compile raises, for a graph break above all.
    """

    def __init__(self, function: Callable[..., Any], *examples: Any, options: dict[str, Any] | None = None) -> None:
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        with torch.no_grad(), warnings.catch_warnings():
            # Saving the guards reads `.grad` of weights that are views.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            self._run = compiled.aot_compile((examples, {}))
        self._run.disable_guard_check()

    def require_same(self, *args: Any) -> None:
        """Raises ValueError if the function was compiled for other arguments than these."""
        with torch.no_grad():
            if self._run.guard_check(*args):
                return
            reason = self._run._artifacts.guard_manager.check_verbose(self._run.prepare_f_locals(*args))
        raise ValueError(f"the function was compiled for other arguments: {reason}")

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def mark_dynamic(tensors: Iterable[Tensor], dim: int = 0) -> None:
    """Lets a size of example arguments vary in calls. It must be 2 or more in the examples."""
    for tensor in tensors:
        if tensor.shape[dim] < 2:
            raise ValueError(f"a size of {tensor.shape[dim]} would be compiled in: shape {tuple(tensor.shape)}, {dim=}")
        torch._dynamo.mark_dynamic(tensor, dim)

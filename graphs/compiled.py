"""Functions compiled ahead of their first call, by this process or an earlier one."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from hybrid_runtime.graphs.inductor import inductor_settings
from hybrid_runtime.graphs.signature import signature

_LOGGER = logging.getLogger(__name__)


class CompiledFunction:
    """A function compiled by Inductor as one graph, for arguments like the examples: nothing is compiled afterwards.

    Sizes that `mark_dynamic` marked may differ from call to call, down to 1. Whatever else the function depends on must
    be as in the examples (`require_same`): a call does not look at it, which saves some 60 us of guards.
    """

    def __init__(self, function: Callable[..., Any], *examples: Any, code: str) -> None:
        """Compiles, or loads what an earlier process compiled from the same code for such examples.

        `code` stands for all that the function's source says, here and in what it calls. Raises what torch.compile
        raises, for a graph break above all.
        """
        self._signature = signature(examples)
        with inductor_settings():
            path = _path_of(function, self._signature, code)
            loaded = _load(path)
            self._run = loaded if loaded is not None else _compile(function, examples, path)
        self._run.disable_guard_check()

    def require_same(self, *args: Any) -> None:
        """Raises ValueError if the function was compiled for other arguments than these."""
        for ours, theirs in zip(self._signature, signature(args), strict=False):
            if ours != theirs:
                raise ValueError(f"compiled for other arguments: {ours}, not {theirs}")

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def mark_dynamic(tensors: Iterable[Tensor], dim: int = 0) -> None:
    """Lets a size of example arguments vary in calls. It must be 2 or more in the examples."""
    for tensor in tensors:
        if tensor.shape[dim] < 2:
            raise ValueError(f"a size of {tensor.shape[dim]} would be compiled in: shape {tuple(tensor.shape)}, {dim=}")
        torch._dynamo.mark_dynamic(tensor, dim)


def _compile(function: Callable[..., Any], examples: tuple[Any, ...], path: Path) -> Any:
    compiled: Any = torch.compile(function, fullgraph=True, dynamic=False)
    with torch.no_grad(), warnings.catch_warnings():
        # Saving the guards reads `.grad` of weights that are views.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        run = compiled.aot_compile((examples, {}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            run.save_compiled_function(str(Path(work) / path.name))
            (Path(work) / path.name).replace(path)  # at once: another process never sees half a file
    except Exception as error:  # the next process compiles again
        _LOGGER.info("what was compiled could not be kept: %s", error)
    return run


def _load(path: Path) -> Any:
    """What an earlier process left at `path`; None if there is nothing of use."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            return torch.compiler.load_compiled_function(file)
    except Exception as error:  # of another machine, or damaged: compile again
        _LOGGER.info("%s is not used: %s", path, error)
        return None


def _path_of(function: Callable[..., Any], lines: tuple[str, ...], code: str) -> Path:
    """In Inductor's cache folder (`TORCHINDUCTOR_CACHE_DIR`), by everything that the result depends on."""
    capability = torch.backends.cpu.get_cpu_capability()
    settings = str(inductor_config.save_config_portable())
    environment = (sys.version, torch.__version__, capability, os.environ.get("CXX", ""), settings, code)
    digest = hashlib.sha256("\0".join([*environment, function.__qualname__, *lines]).encode())
    return Path(cache_dir()) / "hybrid_runtime" / f"{function.__name__.strip('_')}_{digest.hexdigest()[:32]}.bin"

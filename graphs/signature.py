"""What compiled code may rely on, besides its source: the layout of every tensor and all other values it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAVES = (str, int, float, bool, type(None), torch.dtype, torch.device)


def signature(value: Any) -> tuple[str, ...]:
    """One line per leaf of `value`: its path, and what code compiled for it may rely on.

    Of a tensor: dtype, device, and its sizes and strides, `*` where `mark_dynamic` lets a size vary; or, if it has come
    before, where: code may read one in place of the other. Of an object: its class and its attributes; of a function:
    its name. Equal signatures may share compiled code. Raises TypeError for what it does not know.
    """
    return tuple(_Reader({}).lines("", value, frozenset()))


@dataclass
class _Reader:
    first_paths: dict[int, str]  # by the identity of the tensors seen so far

    def lines(self, path: str, value: Any, above: frozenset[int]) -> Iterator[str]:
        """The lines of `value`, which lies in the containers `above`."""
        if isinstance(value, Tensor):
            first = self.first_paths.setdefault(id(value), path)
            yield f"{path}: {_layout(value) if first == path else f'the tensor at {first}'}"
        elif isinstance(value, _LEAVES):
            yield f"{path}: {value!r}"
        elif id(value) in above:
            raise TypeError(f"{path} contains itself")
        elif isinstance(value, tuple | list):
            yield f"{path}: {type(value).__name__} of {len(value)}"
            yield from self._parts(path, enumerate(value), above | {id(value)})
        elif isinstance(value, Mapping):
            yield f"{path}: {type(value).__name__} of {len(value)}"
            yield from self._parts(path, sorted(value.items()), above | {id(value)})
        elif callable(value) and hasattr(value, "__qualname__"):
            yield f"{path}: {value.__module__}.{value.__qualname__}"
        elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
            yield f"{path}: {type(value).__module__}.{type(value).__qualname__}"
            yield from self._parts(path, sorted(vars(value).items()), above | {id(value)})
        else:
            raise TypeError(f"{path} is a {type(value).__name__}")

    def _parts(self, path: str, parts: Any, above: frozenset[int]) -> Iterator[str]:
        for name, part in parts:
            yield from self.lines(f"{path}.{name}", part, above)


def _layout(tensor: Tensor) -> str:
    dynamic: set[int] = getattr(tensor, "_dynamo_dynamic_indices", set())
    sizes = ["*" if dim in dynamic else str(size) for dim, size in enumerate(tensor.shape)]
    strides = [str(stride) for stride in tensor.stride()] if not dynamic else ["*"]
    return f"{tensor.dtype} {tensor.device} [{', '.join(sizes)}] by [{', '.join(strides)}]"

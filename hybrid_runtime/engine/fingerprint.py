"""What a saved prefix cache fits: the model's weights and options, and what its pools hold per slot."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.memory.pools import LayerSpec
from hybrid_runtime.models.hybrid_model import HybridModel

CHUNK_ELEMENTS = 2**24  # hashed at once; a CUDA device's weights come to the host in such pieces


@dataclass(frozen=True)
class SlotLayout:
    """What one slot of a pool holds, per layer: (tensor name, shape), and beside it the dtypes."""

    shapes: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    dtypes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerSpec]) -> SlotLayout:
        return cls(
            tuple(tuple((name, tuple(spec.shape)) for name, spec in layer.items()) for layer in layers),
            tuple(tuple(str(spec.dtype).removeprefix("torch.") for spec in layer.values()) for layer in layers),
        )


@dataclass(frozen=True)
class PoolLayouts:
    """Of both pools."""

    kv: SlotLayout
    states: SlotLayout

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    def difference(self, saved: str) -> str | None:
        """In words, what tells these layouts from others given as JSON; None if nothing does."""
        ours, theirs = json.loads(self.as_json()), json.loads(saved)
        if ours == theirs:
            return None
        for pool in ("kv", "states"):
            if ours[pool]["shapes"] != theirs[pool]["shapes"]:
                return f"another layout of the {pool} pool (layers, tensors or their shapes)"
        names = [
            sorted({name for layer in side[pool]["dtypes"] for name in layer})
            for side in (theirs, ours)
            for pool in ("kv", "states")
        ]
        return f"another dtype: KV {names[0]} and states {names[1]} there, {names[2]} and {names[3]} here"


def weights_digest(model: HybridModel) -> str:
    """SHA-256 of all weights, as they are now, and of the model's options. Reads every byte of them once."""
    digest = hashlib.sha256(repr(model.spec).encode())
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in _tensors("", model.weights):
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first = seen.setdefault(identity, name)  # tied weights are read once
        digest.update(f"{name}={first}:{tensor.dtype}{tuple(tensor.shape)};".encode())
        if first == name:
            for part in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
                digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside dataclasses, tuples and mappings, under a name of its own."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}.{index}", each)
    else:
        assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value).__name__}"

"""What the steps of the report share: fake inputs, the kinds of a model's layers, and which tensors are pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.graphs.compiled import mark_dynamic
from hybrid_runtime.graphs.lowering.step import PoolArgument
from hybrid_runtime.graphs.step_inputs import StepMemory, draw_inputs
from hybrid_runtime.models.block import Block
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import AttentionMixer, MixerMemory
from hybrid_runtime.models.spec import BlockSpec, MoeSpec
from hybrid_runtime.ops.draw import DrawInputs

BATCH = 8
CONTEXT = 1024  # tokens that a row attends to at most
KV_SLOTS, STATE_SLOTS = 65536, 1020  # with the null slot both are prime, as `PoolArgument` asks


def kinds_of_layers(model: HybridModel, memory: StepMemory) -> Iterator[tuple[str, Block, tuple[MixerMemory, ...]]]:
    """The first layer of each kind, with its part of the pools."""
    seen: set[str] = set()
    for block, memories in zip(model.blocks, model.memories(memory), strict=True):
        kind = " + ".join(filter(None, (mixer_kind(block.spec), feed_forward_kind(block.spec))))
        if kind not in seen:
            seen.add(kind)
            yield kind, block, memories


def mixer_kind(spec: BlockSpec) -> str:
    """What mixes in a layer, in a few words: "mamba2"."""
    return " + ".join(type(branch.mixer).__name__.removesuffix("Spec").lower() for branch in spec.branches)


def feed_forward_kind(spec: BlockSpec) -> str:
    """The feed-forward of a layer, in a word; empty if it has none."""
    if spec.feed_forward is None:
        return ""
    return "moe" if isinstance(spec.feed_forward, MoeSpec) else "mlp"


def pools_of(
    block: Block, memories: tuple[MixerMemory, ...], *, kv_rows: int, state_rows: int
) -> tuple[PoolArgument, ...]:
    """The pools of a layer, records included, of which a step touches so many rows."""
    return tuple(
        PoolArgument(name, tensor, kv_rows if isinstance(mixer, AttentionMixer) else state_rows, is_aligned=True)
        for mixer, memory in zip(block.mixers, memories, strict=True)
        for name, tensor in (*memory.tensors.items(), *((f"record {n}", t) for n, t in memory.records.items()))
    )


def tensors_of(inputs: Any) -> list[Tensor]:
    """The tensors among the fields of a dataclass."""
    return [
        value for value in (getattr(inputs, f.name) for f in dataclasses.fields(inputs)) if isinstance(value, Tensor)
    ]


def indices(*shape: int) -> Tensor:
    """int64 on the pretended device."""
    return torch.empty(shape, dtype=torch.int64, device="cuda")


def dynamic_draw(num_rows: int) -> DrawInputs:
    """How some rows choose their tokens; their number may vary."""
    draw = draw_inputs(indices(len(DrawInputs._fields), num_rows))
    mark_dynamic([option for option in draw if option is not None])
    return draw

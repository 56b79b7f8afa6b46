"""Steps compiled by Inductor: one graph per kind of block, one for what stands before and one for what follows them.

Shapes: L tokens of a prefill, S its sequences, B rows of a decode, N tokens or rows, D hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.engine.steps import StepOutputs, choose_greedily
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.models.block import Block
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import MixerMemory
from hybrid_runtime.ops.kernels import compiled_kernels
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE, RaggedLayout

# Of two example sequences; chosen so that no two sizes of the example are the same.
_LENGTHS = (DEFAULT_CHUNK_SIZE + 6, 9)
_STATE_POSITIONS = ((DEFAULT_CHUNK_SIZE + 6,), (3, 5, 9))
_NUM_LOGITS = 7


class CompiledSteps:
    """`Steps` as compiled graphs. One prefill serves all batches; a decode of one row has graphs of its own.

    A block kind is compiled once, whatever its depths, and called per depth: a graph of all depths took over a minute
    to compile and ran no faster. Sizes are dynamic rather than bucketed: nothing is computed for padding, and there is
    one graph to compile instead of one per bucket.
    """

    def __init__(self, model: HybridModel, memory: StepMemory) -> None:
        """Compiles; takes seconds, or tens of seconds where no earlier process has left its results in the cache."""
        self.model = model.with_kernels(compiled_kernels(model.device))
        self._pools = self.model.memories(memory)
        self._prefill = _Graphs(self.model, self._pools, _prefill_block, _example_prefill(self.model.device))
        self._decode_one = _Graphs(self.model, self._pools, _decode_block, _example_decode(1, self.model.device))
        self._decode = _Graphs(self.model, self._pools, _decode_block, _example_decode(2, self.model.device))

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        return self._prefill.run(inputs.token_ids_L, inputs, inputs.logits_tokens_M)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        graphs = self._decode_one if len(inputs.token_ids_B) == 1 else self._decode
        return graphs.run(inputs.token_ids_B, inputs, None)


class _Graphs:
    """The compiled graphs of one kind of forward."""

    def __init__(
        self,
        model: HybridModel,
        pools: Sequence[Sequence[MixerMemory]],
        run_block: Callable[..., Tensor],
        inputs: PrefillInputs | DecodeInputs,
    ) -> None:
        token_ids_N = inputs.token_ids_L if isinstance(inputs, PrefillInputs) else inputs.token_ids_B
        x_ND = model.embed(token_ids_N)
        if len(token_ids_N) > 1:
            mark_dynamic([x_ND])
        kinds: dict[object, CompiledFunction] = {}
        self._blocks: list[tuple[CompiledFunction, Block, Sequence[MixerMemory]]] = []
        for block, memories in zip(model.blocks, pools, strict=True):
            if block.spec not in kinds:
                kinds[block.spec] = CompiledFunction(run_block, block, x_ND, inputs, memories)
            kinds[block.spec].require_same(block, x_ND, inputs, memories)
            self._blocks.append((kinds[block.spec], block, memories))
        self._model = model
        self._embed = CompiledFunction(_embed, model, token_ids_N)
        chosen_M = inputs.logits_tokens_M if isinstance(inputs, PrefillInputs) else None
        self._head = CompiledFunction(_head, model, x_ND, chosen_M)

    def run(self, token_ids_N: Tensor, inputs: PrefillInputs | DecodeInputs, chosen_M: Tensor | None) -> StepOutputs:
        x_ND = self._embed(self._model, token_ids_N)
        for run_block, block, memories in self._blocks:
            x_ND = run_block(block, x_ND, inputs, memories)
        return self._head(self._model, x_ND, chosen_M)


def _prefill_block(block: Block, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return block.prefill(x_LD, inputs, memories)


def _decode_block(block: Block, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return block.decode(x_BD, inputs, memories)


def _embed(model: HybridModel, token_ids_N: Tensor) -> Tensor:
    return model.embed(token_ids_N)


def _head(model: HybridModel, x_ND: Tensor, chosen_M: Tensor | None) -> StepOutputs:
    return choose_greedily(model.logits(x_ND if chosen_M is None else x_ND[chosen_M]))


def _example_decode(num_rows: int, device: torch.device) -> DecodeInputs:
    """Padding rows."""

    def zeros() -> Tensor:
        return torch.zeros(num_rows, dtype=torch.int64, device=device)

    inputs = DecodeInputs(zeros(), zeros(), zeros(), zeros(), zeros() + 1, 1, zeros())
    if num_rows > 1:
        mark_dynamic(_tensors(inputs))
    return inputs


def _example_prefill(device: torch.device) -> PrefillInputs:
    """Two sequences of the null row."""
    layout = RaggedLayout.build(_LENGTHS, _STATE_POSITIONS, chunk_size=DEFAULT_CHUNK_SIZE, device=device)
    num_tokens, num_states = sum(_LENGTHS), len(layout.state_chunk_R)

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    inputs = PrefillInputs(
        layout=layout,
        token_ids_L=zeros(num_tokens),
        positions_L=zeros(num_tokens),
        kv_slots_L=zeros(num_tokens),
        request_rows_S=zeros(len(_LENGTHS)),
        context_lens_S=torch.tensor(_LENGTHS),
        working_slots_S=zeros(len(_LENGTHS)),
        state_slots_R=zeros(num_states),
        logits_tokens_M=zeros(_NUM_LOGITS),
    )
    mark_dynamic([*_tensors(inputs), *_tensors(layout)])
    mark_dynamic([layout.sequence_chunks_SJ], dim=1)
    return inputs


def _tensors(inputs: Any) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]

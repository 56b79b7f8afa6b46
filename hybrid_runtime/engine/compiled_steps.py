"""Steps compiled by Inductor: one graph per kind of block, one for what stands before and one for what follows them.

Shapes: L tokens of a prefill, B rows of a decode, N tokens or rows, M tokens whose logits are wanted, D hidden size,
R rows of the request table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.engine.code_digest import code_digest
from hybrid_runtime.engine.steps import StepOutputs, choose_greedily, known_tokens
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.models.block import Block
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import MixerMemory
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE, RaggedLayout

# Of two example sequences; chosen so that no two sizes of the example are the same.
_LENGTHS = (DEFAULT_CHUNK_SIZE + 6, 9)
_STATE_POSITIONS = ((DEFAULT_CHUNK_SIZE + 6,), (3, 5, 9))
_NUM_LOGITS = 7


class CompiledSteps:
    """`Steps` as compiled graphs: of a prefill and of a decode, of any batch.

    A kind of block is compiled once and called at each of its depths: a graph of all depths of a 32-layer model took
    over a minute to compile. Sizes are dynamic rather than bucketed, so that nothing is computed for padding, and one
    graph is compiled instead of one per bucket.
    """

    def __init__(
        self, model: HybridModel, memory: StepMemory, last_token_R: Tensor, *, report: Callable[[str], None]
    ) -> None:
        """Compiles; takes seconds, or tens of seconds where no earlier process has left its results in the cache.

        The model must run the forms of `compiled_kernels`. `report` is told what is being compiled.
        """
        self.can_be_captured = model.device.type == "cuda"
        self._model = model
        self._last_token_R = last_token_R
        # Kernels on CUDA split a row's context by the longest there may be; those on a CPU go by the row.
        self.max_context_len = memory.req_to_token.shape[1] if self.can_be_captured else 1
        pools = self._model.memories(memory)
        # The plan sizes these by the free memory of the day: compiled code must not depend on it.
        layers = (*memory.kv_layers, *memory.state_layers)
        mark_dynamic([*(pool for layer in layers for pool in layer.values()), memory.req_to_token, last_token_R])
        mark_dynamic([memory.req_to_token], dim=1)
        report("prefill")
        prefill = _example_prefill(model.device)
        self._prefill = _Graphs(
            self._model,
            pools,
            _prefill_block,
            prefill,
            (_embed_prompt, prefill.token_ids_L),
            (_choose, prefill.logits_tokens_M),
        )
        report("decode")
        decode = _example_decode(self.max_context_len, model.device)
        rows = (decode.request_rows_B, last_token_R)
        self._decode = _Graphs(
            self._model,
            pools,
            _decode_block,
            decode,
            (_embed_known, decode.token_ids_B, *rows),
            (_choose_and_keep, *rows),
        )
        report("trial run on the null slot")  # what is left to load or to initialise is so before requests come
        self.prefill(prefill)
        self.decode(decode)

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        return self._prefill.run(inputs, (inputs.token_ids_L,), (inputs.logits_tokens_M,))

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        if inputs.max_context_len != self.max_context_len:
            raise ValueError(f"compiled for max_context_len={self.max_context_len}, not {inputs.max_context_len}")
        rows = (inputs.request_rows_B, self._last_token_R)
        return self._decode.run(inputs, (inputs.token_ids_B, *rows), rows)


class _Graphs:
    """The compiled graphs of one kind of forward, for arguments like the examples.

    `first` and `last`: the functions before and behind the blocks, with what they take after the model (and, the last
    one, the residual stream).
    """

    def __init__(
        self,
        model: HybridModel,
        pools: Sequence[Sequence[MixerMemory]],
        run_block: Callable[..., Tensor],
        inputs: PrefillInputs | DecodeInputs,
        first: tuple[Any, ...],
        last: tuple[Any, ...],
    ) -> None:
        self._model = model
        code = code_digest()
        x_ND = first[0](model, *first[1:])
        mark_dynamic([x_ND])
        self._first = CompiledFunction(first[0], model, *first[1:], code=code)
        kinds: dict[object, CompiledFunction] = {}
        self._blocks: list[tuple[CompiledFunction, Block, Sequence[MixerMemory]]] = []
        for block, memories in zip(model.blocks, pools, strict=True):
            if block.spec not in kinds:
                kinds[block.spec] = CompiledFunction(run_block, block, x_ND, inputs, memories, code=code)
            kinds[block.spec].require_same(block, x_ND, inputs, memories)
            self._blocks.append((kinds[block.spec], block, memories))
        self._last = CompiledFunction(last[0], model, x_ND, *last[1:], code=code)

    def run(self, inputs: PrefillInputs | DecodeInputs, first: tuple[Any, ...], last: tuple[Any, ...]) -> StepOutputs:
        x_ND = self._first(self._model, *first)
        for run_block, block, memories in self._blocks:
            x_ND = run_block(block, x_ND, inputs, memories)
        return self._last(self._model, x_ND, *last)


def _embed_prompt(model: HybridModel, token_ids_L: Tensor) -> Tensor:
    return model.embed(token_ids_L)


def _embed_known(model: HybridModel, token_ids_B: Tensor, request_rows_B: Tensor, last_token_R: Tensor) -> Tensor:
    return model.embed(known_tokens(token_ids_B, request_rows_B, last_token_R))


def _prefill_block(block: Block, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return block.prefill(x_LD, inputs, memories)


def _decode_block(block: Block, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return block.decode(x_BD, inputs, memories)


def _choose(model: HybridModel, x_LD: Tensor, logits_tokens_M: Tensor) -> StepOutputs:
    return choose_greedily(model.logits(x_LD[logits_tokens_M]))


def _choose_and_keep(model: HybridModel, x_BD: Tensor, request_rows_B: Tensor, last_token_R: Tensor) -> StepOutputs:
    outputs = choose_greedily(model.logits(x_BD))
    last_token_R.index_put_((request_rows_B,), outputs.greedy_ids_B)
    return outputs


def _example_decode(max_context_len: int, device: torch.device) -> DecodeInputs:
    """Two padding rows. The longest context is compiled in: kernels split contexts by it."""

    def zeros() -> Tensor:
        return torch.zeros(2, dtype=torch.int64, device=device)

    inputs = DecodeInputs(
        token_ids_B=zeros(),
        positions_B=zeros(),
        kv_slots_B=zeros(),
        request_rows_B=zeros(),
        context_lens_B=zeros() + 1,
        max_context_len=max_context_len,
        working_slots_B=zeros(),
    )
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


def _tensors(inputs: PrefillInputs | DecodeInputs | RaggedLayout) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]

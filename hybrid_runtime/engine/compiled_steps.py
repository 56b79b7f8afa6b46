"""Steps compiled by Inductor: one graph per kind of layer, one for what stands before and one for what follows them.

Shapes: L tokens of a prefill, B rows of a decode, N tokens or rows, M tokens whose logits are wanted, D hidden size,
R rows of the request table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybrid_runtime.engine.code_digest import code_digest
from hybrid_runtime.engine.steps import StepOutputs, choose_greedily, known_tokens
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.signature import signature
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.models.block import Block, FeedForwardSublayer, MixerSublayer
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import MixerMemory
from hybrid_runtime.ops.kernels import wait_for_kernels
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE, RaggedLayout

# Of two example sequences; chosen so that no two sizes of the example are the same.
_LENGTHS = (DEFAULT_CHUNK_SIZE + 6, 9)
_STATE_POSITIONS = ((DEFAULT_CHUNK_SIZE + 6,), (3, 5, 9))
_NUM_LOGITS = 7

NUM_PARTS = 5  # that are reported while steps are compiled


class CompiledSteps:
    """`Steps` as compiled graphs: of a prefill and of a decode, of any batch.

    A kind of layer is compiled once and called at each of its depths: a graph of all depths of a 32-layer model took
    over a minute to compile. Sizes are dynamic rather than bucketed, so that nothing is computed for padding, and one
    graph is compiled instead of one per bucket. A decode calls one graph per block; a prefill, where a call costs
    little beside its work, one for the mixers and one for the feed-forward, which all blocks may share.
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
        prefill, decode = _example_prefill(model.device), _example_decode(self.max_context_len, model.device)

        report("embedding and choice of tokens")
        code = code_digest()
        tokens = (prefill.token_ids_L, torch.zeros_like(prefill.token_ids_L))
        mark_dynamic(tokens)
        self._embed = CompiledFunction(embed_tokens, model, *tokens, last_token_R, code=code)
        x_MD = model.embed(prefill.logits_tokens_M)
        mark_dynamic([x_MD])
        self._choose = CompiledFunction(choose_tokens, model, x_MD, prefill.logits_rows_M, last_token_R, code=code)
        report("prefill")
        self._prefill_layers = _prefill_layers(model, pools, prefill)
        report("decode")
        self._decode_layers = _decode_layers(model, pools, decode)
        report("kernels")
        wait_for_kernels(model.device)
        report("trial run on the null slot")  # what is left to load or to initialise is so before requests come
        self.prefill(prefill)
        self.decode(decode)

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs) -> StepOutputs:
        x_LD = self._embed(self._model, inputs.token_ids_L, torch.zeros_like(inputs.token_ids_L), self._last_token_R)
        for mixing, feed_forward in self._prefill_layers[:-1]:
            x_LD = feed_forward(mixing(x_LD, inputs))
        mixing, feed_forward = self._prefill_layers[-1]
        x_MD = feed_forward(mixing(x_LD, inputs)[inputs.logits_tokens_M])
        return self._choose(self._model, x_MD, inputs.logits_rows_M, self._last_token_R)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs) -> StepOutputs:
        if inputs.max_context_len != self.max_context_len:
            raise ValueError(f"compiled for max_context_len={self.max_context_len}, not {inputs.max_context_len}")
        x_BD = self._embed(self._model, inputs.token_ids_B, inputs.request_rows_B, self._last_token_R)
        for layer in self._decode_layers:
            x_BD = layer(x_BD, inputs)
        return self._choose(self._model, x_BD, inputs.request_rows_B, self._last_token_R)


_Mixing: TypeAlias = Callable[[Tensor, PrefillInputs], Tensor]
_FeedForward: TypeAlias = Callable[[Tensor], Tensor]


class _Kinds:
    """One compiled function per kind of layer: for layers that differ in what they hold, and not in its layout."""

    def __init__(self, run_layer: Callable[..., Tensor]) -> None:
        self._run_layer = run_layer
        self._kinds: dict[tuple[str, ...], CompiledFunction] = {}

    def of(self, layer: object, x_ND: Tensor, *rest: Any) -> CompiledFunction:
        """The function for calls with `layer` and arguments like these; compiled unless there is one."""
        kind = signature((layer, rest))
        if kind not in self._kinds:
            self._kinds[kind] = CompiledFunction(self._run_layer, layer, x_ND, *rest, code=code_digest())
        self._kinds[kind].require_same(layer, x_ND, *rest)
        return self._kinds[kind]


def _prefill_layers(
    model: HybridModel, pools: Sequence[Sequence[MixerMemory]], inputs: PrefillInputs
) -> list[tuple[_Mixing, _FeedForward]]:
    """Of each block: its mixers, its feed-forward; what a block does not have returns the stream as it is."""
    x_LD = model.embed(inputs.token_ids_L)
    mark_dynamic([x_LD])
    mixings, feed_forwards = _Kinds(_mix_prefill), _Kinds(_feed_forward_prefill)

    def mixing_of(block: Block, memories: Sequence[MixerMemory]) -> _Mixing:
        mixing = block.mixing
        if mixing is None:
            return lambda x_LD, inputs: x_LD
        run = mixings.of(mixing, x_LD, inputs, memories)
        return lambda x_LD, inputs: run(mixing, x_LD, inputs, memories)

    def feed_forward_of(block: Block) -> _FeedForward:
        feed_forward = block.feed_forward
        if feed_forward is None:
            return lambda x_ND: x_ND
        return partial(feed_forwards.of(feed_forward, x_LD), feed_forward)

    layers = zip(model.blocks, pools, strict=True)
    return [(mixing_of(block, memories), feed_forward_of(block)) for block, memories in layers]


def _decode_layers(
    model: HybridModel, pools: Sequence[Sequence[MixerMemory]], inputs: DecodeInputs
) -> list[Callable[[Tensor, DecodeInputs], Tensor]]:
    x_BD = model.embed(inputs.token_ids_B)
    mark_dynamic([x_BD])
    kinds = _Kinds(_decode_block)

    def layer_of(block: Block, memories: Sequence[MixerMemory]) -> Callable[[Tensor, DecodeInputs], Tensor]:
        run = kinds.of(block, x_BD, inputs, memories)
        return lambda x_BD, inputs: run(block, x_BD, inputs, memories)

    return [layer_of(block, memories) for block, memories in zip(model.blocks, pools, strict=True)]


def embed_tokens(model: HybridModel, token_ids_N: Tensor, request_rows_N: Tensor, last_token_R: Tensor) -> Tensor:
    """What the first block reads; a token IN_FLIGHT is the one chosen last for its row of the table."""
    return model.embed(known_tokens(token_ids_N, request_rows_N, last_token_R))


def choose_tokens(model: HybridModel, x_MD: Tensor, request_rows_M: Tensor, last_token_R: Tensor) -> StepOutputs:
    """The step's outputs from the residual stream behind the last block; writes `last_token_R`."""
    return choose_greedily(model.logits(x_MD), request_rows_M, last_token_R)


def _mix_prefill(mixing: MixerSublayer, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return mixing.prefill(x_LD, inputs, memories)


def _feed_forward_prefill(feed_forward: FeedForwardSublayer, x_ND: Tensor) -> Tensor:
    return feed_forward.prefill(x_ND)


def _decode_block(block: Block, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return block.decode(x_BD, inputs, memories)


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
        logits_rows_M=zeros(_NUM_LOGITS),
    )
    mark_dynamic([*_tensors(inputs), *_tensors(layout)])
    mark_dynamic([layout.sequence_chunks_SJ], dim=1)
    return inputs


def _tensors(inputs: PrefillInputs | DecodeInputs | RaggedLayout) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]

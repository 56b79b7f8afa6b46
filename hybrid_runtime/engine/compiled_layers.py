"""The layers of a model as compiled functions: one for each kind of layer, called at each of its depths.

Shapes: L tokens of a prefill, B rows of a decode, N tokens, rows or nodes, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from hybrid_runtime.engine.code_digest import code_digest
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.signature import signature
from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.models.block import Block, FeedForwardSublayer, MixerSublayer
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import MixerMemory, RecurrentMixer
from hybrid_runtime.models.rollback import Rollback

Layer: TypeAlias = Callable[[Tensor, Any], Tensor]  # of the residual stream and the inputs of the step


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


class CompiledLayers:
    """The layers of a model, compiled for steps with inputs like some examples."""

    def __init__(self, model: HybridModel, pools: Sequence[Sequence[MixerMemory]]) -> None:
        self._model = model
        self._blocks = list(zip(model.blocks, pools, strict=True))
        self._feed_forwards = _Kinds(_feed_forward_prefill)  # of those with one form, for decodes, too

    def prefill(self, inputs: PrefillInputs) -> list[Layer]:
        """Of each block its mixers, then its feed-forward; what a block lacks changes nothing."""
        return self._halves(inputs, inputs.token_ids_L, _Kinds(_mix_prefill), self._feed_forwards)

    def decode(self, inputs: DecodeInputs) -> list[Layer]:
        """As for a prefill, so that less is compiled; on CUDA one per block: fused, a block takes a launch less."""
        if self._model.device.type != "cuda":
            return self._halves(inputs, inputs.token_ids_B, _Kinds(_mix_decode), _Kinds(_feed_forward_decode))
        x_BD, blocks = self._stream(inputs.token_ids_B), _Kinds(_decode_block)
        return [_bound(blocks, block, x_BD, inputs, memories) for block, memories in self._blocks]

    def verify(self, inputs: VerifyInputs, rollback: Rollback) -> list[Layer]:
        """Cut as for a decode."""
        token_ids_N = inputs.token_ids_BT.flatten()
        if self._model.device.type != "cuda":
            return self._halves(inputs, token_ids_N, _Kinds(_mix_verify), _Kinds(_feed_forward_decode), rollback)
        x_ND, blocks = self._stream(token_ids_N), _Kinds(_verify_block)
        return [_bound(blocks, block, x_ND, inputs, memories, rollback) for block, memories in self._blocks]

    def commit(self, inputs: CommitInputs, rollback: Rollback) -> list[Callable[[CommitInputs], None]]:
        """Of the blocks that have states."""
        kinds = _Kinds(commit_states)
        layers: list[Callable[[CommitInputs], None]] = []
        for block, memories in self._blocks:
            if block.mixing is not None and any(isinstance(mixer, RecurrentMixer) for mixer in block.mixers):
                layers.append(_bound_commit(kinds, block.mixing, inputs, memories, rollback))
        return layers

    def _halves(
        self, inputs: Any, token_ids_N: Tensor, mixings: _Kinds, feed_forwards: _Kinds, *rest: Any
    ) -> list[Layer]:
        x_ND = self._stream(token_ids_N)
        layers: list[Layer] = []
        for block, memories in self._blocks:
            mixing, half = block.mixing, block.feed_forward
            layers.append(_bound(mixings, mixing, x_ND, inputs, memories, *rest) if mixing is not None else _unchanged)
            if half is None:
                layers.append(_unchanged)
            else:
                kinds = self._feed_forwards if half.feed_forward.has_one_form else feed_forwards
                layers.append(_bound(kinds, half, x_ND, None))
        return layers

    def _stream(self, token_ids_N: Tensor) -> Tensor:
        x_ND = self._model.embed(token_ids_N)
        mark_dynamic([x_ND])
        return x_ND


def _bound(kinds: _Kinds, layer: object, x_ND: Tensor, inputs: Any, *rest: Any) -> Layer:
    """The compiled function of a layer with everything but the stream and the inputs given."""
    run = kinds.of(layer, x_ND, inputs, *rest)
    if inputs is None:
        return lambda x_ND, _: run(layer, x_ND, None)
    return lambda x_ND, inputs: run(layer, x_ND, inputs, *rest)


def _bound_commit(
    kinds: _Kinds, mixing: MixerSublayer, inputs: CommitInputs, *rest: Any
) -> Callable[[CommitInputs], None]:
    run = kinds.of(mixing, inputs.request_rows_B, inputs, *rest)
    return lambda inputs: run(mixing, inputs.request_rows_B, inputs, *rest)


def _unchanged(x_ND: Tensor, _: Any) -> Tensor:
    return x_ND


def _mix_prefill(mixing: MixerSublayer, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return mixing.prefill(x_LD, inputs, memories)


def _mix_decode(mixing: MixerSublayer, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return mixing.decode(x_BD, inputs, memories)


def _mix_verify(
    mixing: MixerSublayer, x_ND: Tensor, inputs: VerifyInputs, memories: Sequence[MixerMemory], rollback: Rollback
) -> Tensor:
    return mixing.verify(x_ND, inputs, memories, rollback)


def commit_states(
    mixing: MixerSublayer, rows_B: Tensor, inputs: CommitInputs, memories: Sequence[MixerMemory], rollback: Rollback
) -> Tensor:
    """A commit, as a function that takes a tensor and returns one, as those of layers do: `rows_B`."""
    mixing.commit(inputs, memories, rollback)
    return rows_B


def _feed_forward_prefill(half: FeedForwardSublayer, x_ND: Tensor, _: None) -> Tensor:
    return half.prefill(x_ND)


def _feed_forward_decode(half: FeedForwardSublayer, x_ND: Tensor, _: None) -> Tensor:
    return half.decode(x_ND)


def _decode_block(block: Block, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return block.decode(x_BD, inputs, memories)


def _verify_block(
    block: Block, x_ND: Tensor, inputs: VerifyInputs, memories: Sequence[MixerMemory], rollback: Rollback
) -> Tensor:
    return block.verify(x_ND, inputs, memories, rollback)

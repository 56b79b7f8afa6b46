"""Steps compiled by Inductor: one graph per kind of layer, one for what stands before and one for what follows them.

Shapes: L tokens of a prefill, B rows of a decode, N tokens or rows, M tokens whose logits are wanted, D hidden size,
R rows of the request table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybrid_runtime.engine.code_digest import code_digest
from hybrid_runtime.engine.steps import (
    SpeculativeSteps,
    StepOutputs,
    VerifyOutputs,
    known_tokens,
    outputs_of,
)
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.inductor import many_graphs
from hybrid_runtime.graphs.signature import signature
from hybrid_runtime.graphs.step_inputs import (
    CommitInputs,
    DecodeInputs,
    PrefillInputs,
    StepMemory,
    VerifyInputs,
    draw_inputs,
)
from hybrid_runtime.models.block import Block, FeedForwardSublayer, MixerSublayer
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import MixerMemory, RecurrentMixer
from hybrid_runtime.models.rollback import Rollback
from hybrid_runtime.ops.draft_tree import AcceptedPath, draft_tree
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.kernels import wait_for_kernels
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE, RaggedLayout

# Of two example sequences; chosen so that no two sizes of the example are the same.
_LENGTHS = (DEFAULT_CHUNK_SIZE + 6, 9)
_STATE_POSITIONS = ((DEFAULT_CHUNK_SIZE + 6,), (3, 5, 9))
_NUM_LOGITS = 7

NUM_PARTS = 5  # that are reported while steps are compiled
NUM_SPECULATIVE_PARTS = 2  # more, for a runtime that speculates


class CompiledSteps:
    """`Steps` as compiled graphs: of a prefill and of a decode, of any batch.

    A kind of layer is compiled once and called at each of its depths: a graph of all depths of a 32-layer model took
    over a minute to compile. Sizes are dynamic rather than bucketed, so that nothing is computed for padding, and one
    graph is compiled instead of one per bucket. A block is cut into its mixers and its feed-forward, which the blocks
    of a model, prefills and decodes often share.
    """

    def __init__(
        self,
        model: HybridModel,
        memory: StepMemory,
        last_token_R: Tensor,
        speculative: SpeculativeSteps | None = None,
        *,
        report: Callable[[str], None],
    ) -> None:
        """Compiles; takes seconds, or tens of seconds where no earlier process has left its results in the cache.

        The model must run the forms of `compiled_kernels`. `report` is told what is being compiled.
        """
        self.can_be_captured = model.device.type == "cuda"
        compiles_trees = speculative is not None and model.device.type == "cpu"
        self._model = model
        self._last_token_R = last_token_R
        self._memory = memory
        self._speculative = speculative
        # Kernels on CUDA split a row's context by the longest there may be; those on a CPU go by the row.
        self.max_context_len = memory.req_to_token.shape[1] if self.can_be_captured else 1
        pools = self._model.memories(memory)
        # The plan sizes these by the free memory of the day: compiled code must not depend on it.
        tensors = [pool for layer in (*memory.kv_layers, *memory.state_layers) for pool in layer.values()]
        records = [record for layer in memory.record_layers for record in layer.values()]
        mark_dynamic([*tensors, *records, memory.req_to_token, last_token_R])
        mark_dynamic(records, dim=1)
        mark_dynamic([memory.req_to_token], dim=1)
        prefill, decode = _example_prefill(model.device), _example_decode(self.max_context_len, model.device)

        with many_graphs() if model.device.type == "cpu" else nullcontext():
            report("choice of tokens")
            code = code_digest()
            self._embed: Callable[..., Tensor] = embed_tokens
            if model.device.type == "cuda":  # on a CPU a graph costs as much per call as its three operations
                tokens = (prefill.token_ids_L, torch.zeros_like(prefill.token_ids_L))
                mark_dynamic(tokens)
                self._embed = CompiledFunction(embed_tokens, model, *tokens, last_token_R, code=code)
            x_MD = model.embed(prefill.logits_tokens_M)
            mark_dynamic([x_MD])
            draw = _example_draw(_NUM_LOGITS, model.device)
            chosen = (model, x_MD, prefill.logits_rows_M, last_token_R, draw)
            self._choose = CompiledFunction(choose_tokens, *chosen, code=code)
            layers = _Layers(model, pools)
            report("prefill")
            self._prefill_layers = layers.prefill(prefill)
            report("decode")
            self._decode_layers = layers.decode(decode)
            if speculative is not None and compiles_trees:
                verify, commit = _example_verify(speculative.num_nodes), _example_commit(speculative.num_nodes)
                report("verify")
                self._verify_layers = layers.verify(verify, speculative.rollback)
                report("commit")
                if not speculative.rollback.is_lazy:
                    self._commit_layers = layers.commit(commit, speculative.rollback)
            report("kernels")
        wait_for_kernels(model.device, trees=compiles_trees)
        report("trial run on the null slot")  # what is left to load or to initialise is so before requests come
        self.prefill(prefill, draw)
        self.decode(decode, _example_draw(len(decode.token_ids_B), model.device))
        if speculative is not None and compiles_trees:
            one_row = _verify_of_padding(1, speculative.num_nodes)  # records need not have room for more
            self.verify(one_row, _example_draw(speculative.num_nodes, model.device))
            self.commit(_commit_of_padding(1, speculative.num_nodes))

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs, draw: DrawInputs) -> StepOutputs:
        x_LD = self._embed(self._model, inputs.token_ids_L, torch.zeros_like(inputs.token_ids_L), self._last_token_R)
        *layers, last_feed_forward = self._prefill_layers
        for layer in layers:
            x_LD = layer(x_LD, inputs)
        # Nothing reads what the last feed-forward makes of the other tokens.
        x_MD = last_feed_forward(x_LD[inputs.logits_tokens_M], inputs)
        self._note_hidden(x_MD, inputs.logits_rows_M)
        return self._choose(self._model, x_MD, inputs.logits_rows_M, self._last_token_R, draw)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, draw: DrawInputs) -> StepOutputs:
        if inputs.max_context_len != self.max_context_len:
            raise ValueError(f"compiled for max_context_len={self.max_context_len}, not {inputs.max_context_len}")
        x_BD = self._embed(self._model, inputs.token_ids_B, inputs.request_rows_B, self._last_token_R)
        for layer in self._decode_layers:
            x_BD = layer(x_BD, inputs)
        self._note_hidden(x_BD, inputs.request_rows_B)
        return self._choose(self._model, x_BD, inputs.request_rows_B, self._last_token_R, draw)

    def tree_size(self, num_nodes: int) -> int:
        return num_nodes

    @torch.no_grad()
    def verify(self, inputs: VerifyInputs, draw: DrawInputs) -> VerifyOutputs:
        assert self._speculative is not None
        if self.can_be_captured:  # not compiled yet on CUDA: the plain forms take the longest context there is
            inputs = dataclasses.replace(inputs, max_context_len=max(1, int(inputs.committed_lens_B.max())))
            x_ND = self._model.verify_stream(inputs, self._memory, self._speculative.rollback)
        else:
            token_ids_N = inputs.token_ids_BT.flatten()
            x_ND = self._embed(self._model, token_ids_N, torch.zeros_like(token_ids_N), self._last_token_R)
            for layer in self._verify_layers:
                x_ND = layer(x_ND, inputs)
        nowhere_N = torch.zeros_like(draw.seeds_B)
        chosen: StepOutputs = self._choose(self._model, x_ND, nowhere_N, self._last_token_R, draw)
        return VerifyOutputs(chosen.logits_BV, chosen.token_ids_B, chosen.is_invalid_B, x_ND)

    @torch.no_grad()
    def commit(self, inputs: CommitInputs) -> None:
        assert self._speculative is not None
        if self.can_be_captured or self._speculative.rollback.is_lazy:  # a replay walks along paths of any length
            self._model.commit(inputs, self._memory, self._speculative.rollback)
            return
        for layer in self._commit_layers:
            layer(inputs)

    def _note_hidden(self, x_BD: Tensor, request_rows_B: Tensor) -> None:
        if self._speculative is not None and self._speculative.hidden_RD is not None:
            self._speculative.hidden_RD.index_put_((request_rows_B,), x_BD)


_Layer: TypeAlias = Callable[[Tensor, Any], Tensor]  # of the residual stream and the inputs of the step


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


class _Layers:
    """The layers of a model, compiled for steps with inputs like some examples."""

    def __init__(self, model: HybridModel, pools: Sequence[Sequence[MixerMemory]]) -> None:
        self._model = model
        self._blocks = list(zip(model.blocks, pools, strict=True))
        self._feed_forwards = _Kinds(_feed_forward_prefill)  # of those with one form, for decodes, too

    def prefill(self, inputs: PrefillInputs) -> list[_Layer]:
        """Of each block its mixers, then its feed-forward; what a block lacks changes nothing."""
        return self._halves(inputs, inputs.token_ids_L, _Kinds(_mix_prefill), self._feed_forwards)

    def decode(self, inputs: DecodeInputs) -> list[_Layer]:
        """As for a prefill, so that less is compiled; on CUDA one per block: fused, a block takes a launch less."""
        if self._model.device.type != "cuda":
            return self._halves(inputs, inputs.token_ids_B, _Kinds(_mix_decode), _Kinds(_feed_forward_decode))
        x_BD, blocks = self._stream(inputs.token_ids_B), _Kinds(_decode_block)
        return [_bound(blocks, block, x_BD, inputs, memories) for block, memories in self._blocks]

    def verify(self, inputs: VerifyInputs, rollback: Rollback) -> list[_Layer]:
        """As for a prefill."""
        return self._halves(
            inputs, inputs.token_ids_BT.flatten(), _Kinds(_mix_verify), _Kinds(_feed_forward_decode), rollback
        )

    def commit(self, inputs: CommitInputs, rollback: Rollback) -> list[Callable[[CommitInputs], None]]:
        """Of the blocks that have states."""
        kinds = _Kinds(_commit_states)
        layers: list[Callable[[CommitInputs], None]] = []
        for block, memories in self._blocks:
            if block.mixing is not None and any(isinstance(mixer, RecurrentMixer) for mixer in block.mixers):
                layers.append(_bound_commit(kinds, block.mixing, inputs, memories, rollback))
        return layers

    def _halves(
        self, inputs: Any, token_ids_N: Tensor, mixings: _Kinds, feed_forwards: _Kinds, *rest: Any
    ) -> list[_Layer]:
        x_ND = self._stream(token_ids_N)
        layers: list[_Layer] = []
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


def _bound(kinds: _Kinds, layer: object, x_ND: Tensor, inputs: Any, *rest: Any) -> _Layer:
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


def embed_tokens(model: HybridModel, token_ids_N: Tensor, request_rows_N: Tensor, last_token_R: Tensor) -> Tensor:
    """What the first block reads; a token IN_FLIGHT is the one chosen last for its row of the table."""
    return model.embed(known_tokens(token_ids_N, request_rows_N, last_token_R))


def choose_tokens(
    model: HybridModel, x_MD: Tensor, request_rows_M: Tensor, last_token_R: Tensor, draw: DrawInputs
) -> StepOutputs:
    """The step's outputs from the residual stream behind the last block; writes `last_token_R`."""
    logits_MV = model.logits(x_MD)
    return outputs_of(logits_MV, model.kernels.draw_tokens(logits_MV, draw), request_rows_M, last_token_R)


def _mix_prefill(mixing: MixerSublayer, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return mixing.prefill(x_LD, inputs, memories)


def _mix_decode(mixing: MixerSublayer, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
    return mixing.decode(x_BD, inputs, memories)


def _mix_verify(
    mixing: MixerSublayer, x_ND: Tensor, inputs: VerifyInputs, memories: Sequence[MixerMemory], rollback: Rollback
) -> Tensor:
    return mixing.verify(x_ND, inputs, memories, rollback)


def _commit_states(
    mixing: MixerSublayer, rows_B: Tensor, inputs: CommitInputs, memories: Sequence[MixerMemory], rollback: Rollback
) -> Tensor:
    mixing.commit(inputs, memories, rollback)
    return rows_B


def _feed_forward_prefill(half: FeedForwardSublayer, x_ND: Tensor, _: None) -> Tensor:
    return half.prefill(x_ND)


def _feed_forward_decode(half: FeedForwardSublayer, x_ND: Tensor, _: None) -> Tensor:
    return half.decode(x_ND)


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


def _example_verify(num_nodes: int) -> VerifyInputs:
    """Three rows, of trees that `num_nodes` nodes hold."""
    inputs = _verify_of_padding(3, min(num_nodes, 5))
    tensors = [*_tensors(inputs), *inputs.tree]
    mark_dynamic(tensors)
    for tensor in tensors:
        for dim in range(1, tensor.dim()):
            mark_dynamic([tensor], dim)
    return inputs


def _verify_of_padding(num_rows: int, num_nodes: int) -> VerifyInputs:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    return VerifyInputs(
        token_ids_BT=zeros(num_rows, num_nodes),
        positions_BT=zeros(num_rows, num_nodes),
        kv_slots_BT=zeros(num_rows, num_nodes),
        request_rows_B=zeros(num_rows),
        committed_lens_B=zeros(num_rows),
        max_context_len=1,
        working_slots_B=zeros(num_rows),
        tree=draft_tree(zeros(num_rows, num_nodes)),
    )


def _example_commit(num_nodes: int) -> CommitInputs:
    """Three rows that accept nothing."""
    inputs = _commit_of_padding(3, min(num_nodes, 5))
    mark_dynamic([*_tensors(inputs), *inputs.path])
    mark_dynamic([inputs.path.nodes_BT], 1)
    return inputs


def _commit_of_padding(num_rows: int, num_nodes: int) -> CommitInputs:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    path = AcceptedPath(zeros(num_rows, num_nodes), zeros(num_rows))
    return CommitInputs(zeros(num_rows), zeros(num_rows), zeros(num_rows), path)


def _example_draw(num_rows: int, device: torch.device) -> DrawInputs:
    """Greedy rows."""
    draw = draw_inputs(torch.zeros(len(DrawInputs._fields), num_rows, dtype=torch.int64, device=device))
    mark_dynamic([option for option in draw if option is not None])
    return draw


def _tensors(inputs: PrefillInputs | DecodeInputs | VerifyInputs | CommitInputs | RaggedLayout) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]

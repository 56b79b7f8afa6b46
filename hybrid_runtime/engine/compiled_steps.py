"""Steps compiled by Inductor: one graph per kind of layer, one for what stands before and one for what follows them.

Shapes: L tokens of a prefill, B rows of a decode, N tokens, rows or nodes, M tokens whose logits are wanted, D hidden
size, R rows of the request table.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from hybrid_runtime.engine.code_digest import code_digest
from hybrid_runtime.engine.compiled_layers import CompiledLayers
from hybrid_runtime.engine.example_inputs import (
    NUM_LOGITS,
    commit_of_padding,
    example_commit,
    example_decode,
    example_draw,
    example_prefill,
    example_verify,
    verify_of_padding,
)
from hybrid_runtime.engine.steps import (
    SpeculativeSteps,
    StepOutputs,
    VerifyOutputs,
    known_tokens,
    outputs_of,
)
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.inductor import many_graphs
from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, PrefillInputs, StepMemory, VerifyInputs
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.kernels import wait_for_kernels

NUM_PARTS = 5  # that are reported while steps are compiled
NUM_SPECULATIVE_PARTS = 2  # more, for a runtime that speculates
_POOL_ALIGNMENT = 16  # bytes: of an input that is not, code for CUDA makes a copy first


class CompiledSteps:
    """`Steps` as compiled graphs: of a prefill, a decode, a verify and a commit, of any batch.

    A kind of layer is compiled once and called at each of its depths: a graph of all depths of a 32-layer model took
    over a minute to compile. Sizes are dynamic rather than bucketed, so that nothing is computed for padding, and one
    graph is compiled instead of one per bucket. A block is cut into its mixers and its feed-forward, which the blocks
    of a model, prefills and decodes often share. On CUDA, where verifies are captured, their trees have one size.
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
        self._model = model
        self._last_token_R = last_token_R
        self._memory = memory
        self._speculative = speculative
        # Kernels on CUDA split a row's context by the longest there may be; those on a CPU go by the row.
        self.max_context_len = memory.req_to_token.shape[1] if self.can_be_captured else 1
        self._prepare_memory()
        layers = CompiledLayers(model, model.memories(memory))
        device = model.device
        prefill, decode = example_prefill(device), example_decode(self.max_context_len, device)
        draw = example_draw(NUM_LOGITS, device)

        with many_graphs() if device.type == "cpu" else nullcontext():
            report("choice of tokens")
            self._compile_ends(prefill, draw)
            report("prefill")
            self._prefill_layers = layers.prefill(prefill)
            report("decode")
            self._decode_layers = layers.decode(decode)
            if speculative is not None:
                self._compile_speculative(layers, speculative, report)
            report("kernels")
        wait_for_kernels(device, trees=speculative is not None)
        report("trial run on the null slot")  # what is left to load or to initialise is so before requests come
        self.prefill(prefill, draw)
        self.decode(decode, example_draw(len(decode.token_ids_B), device))
        if speculative is not None:  # of one row: records need not have room for more
            num_nodes = speculative.num_nodes
            one_row = verify_of_padding(1, num_nodes, self.max_context_len, device)
            self.verify(one_row, example_draw(num_nodes, device))
            self.commit(commit_of_padding(1, num_nodes, device))

    def _prepare_memory(self) -> None:
        """Marks the sizes of pools, which the plan sets by the free memory of the day: compiled code must not depend
        on them."""
        memory = self._memory
        pools = [pool for layer in (*memory.kv_layers, *memory.state_layers) for pool in layer.values()]
        records = [record for layer in memory.record_layers for record in layer.values()]
        for tensor in (*pools, *records):
            assert tensor.data_ptr() % _POOL_ALIGNMENT == 0
        mark_dynamic([*pools, *records, memory.req_to_token, self._last_token_R])
        mark_dynamic(records, dim=1)
        mark_dynamic([memory.req_to_token], dim=1)

    def _compile_ends(self, prefill: PrefillInputs, draw: DrawInputs) -> None:
        """What stands before the layers, and what follows them."""
        model, code = self._model, code_digest()
        self._embed: Callable[..., Tensor] = embed_tokens
        if model.device.type == "cuda":  # on a CPU a graph costs as much per call as its three operations
            tokens = (prefill.token_ids_L, torch.zeros_like(prefill.token_ids_L))
            mark_dynamic(tokens)
            self._embed = CompiledFunction(embed_tokens, model, *tokens, self._last_token_R, code=code)
        x_MD = model.embed(prefill.logits_tokens_M)
        mark_dynamic([x_MD])
        chosen = (model, x_MD, prefill.logits_rows_M, self._last_token_R, draw)
        self._choose = CompiledFunction(choose_tokens, *chosen, code=code)

    def _compile_speculative(
        self, layers: CompiledLayers, speculative: SpeculativeSteps, report: Callable[[str], None]
    ) -> None:
        num_nodes, device, varying = speculative.num_nodes, self._model.device, not self.can_be_captured
        report("verify")
        verify = example_verify(num_nodes, self.max_context_len, device, varying=varying)
        self._verify_layers = layers.verify(verify, speculative.rollback)
        report("commit")
        if not speculative.rollback.is_lazy:
            commit = example_commit(num_nodes, device, varying=varying)
            self._commit_layers = layers.commit(commit, speculative.rollback)

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
        self._require_context(inputs)
        x_BD = self._embed(self._model, inputs.token_ids_B, inputs.request_rows_B, self._last_token_R)
        for layer in self._decode_layers:
            x_BD = layer(x_BD, inputs)
        self._note_hidden(x_BD, inputs.request_rows_B)
        return self._choose(self._model, x_BD, inputs.request_rows_B, self._last_token_R, draw)

    def tree_size(self, num_nodes: int) -> int:
        assert self._speculative is not None
        return self._speculative.num_nodes if self.can_be_captured else num_nodes

    @torch.no_grad()
    def verify(self, inputs: VerifyInputs, draw: DrawInputs) -> VerifyOutputs:
        self._require_context(inputs)
        assert inputs.num_nodes == self.tree_size(inputs.num_nodes)
        token_ids_N = inputs.token_ids_BT.flatten()
        nowhere_N = torch.zeros_like(token_ids_N)
        x_ND = self._embed(self._model, token_ids_N, nowhere_N, self._last_token_R)
        for layer in self._verify_layers:
            x_ND = layer(x_ND, inputs)
        chosen: StepOutputs = self._choose(self._model, x_ND, nowhere_N, self._last_token_R, draw)
        return VerifyOutputs(chosen.logits_BV, chosen.token_ids_B, chosen.is_invalid_B, x_ND)

    @torch.no_grad()
    def commit(self, inputs: CommitInputs) -> None:
        """Compiled, but for the rollback `replay`: it walks along paths by the one-token forms, and stops behind the
        longest, where a compiled walk would be as long as the largest tree."""
        assert self._speculative is not None
        if self._speculative.rollback.is_lazy:
            self._model.commit(inputs, self._memory, self._speculative.rollback)
            return
        for layer in self._commit_layers:
            layer(inputs)

    def _require_context(self, inputs: DecodeInputs | VerifyInputs) -> None:
        if inputs.max_context_len != self.max_context_len:
            raise ValueError(f"compiled for max_context_len={self.max_context_len}, not {inputs.max_context_len}")

    def _note_hidden(self, x_BD: Tensor, request_rows_B: Tensor) -> None:
        if self._speculative is not None and self._speculative.hidden_RD is not None:
            self._speculative.hidden_RD.index_put_((request_rows_B,), x_BD)


def embed_tokens(model: HybridModel, token_ids_N: Tensor, request_rows_N: Tensor, last_token_R: Tensor) -> Tensor:
    """What the first block reads; a token IN_FLIGHT is the one chosen last for its row of the table."""
    return model.embed(known_tokens(token_ids_N, request_rows_N, last_token_R))


def choose_tokens(
    model: HybridModel, x_MD: Tensor, request_rows_M: Tensor, last_token_R: Tensor, draw: DrawInputs
) -> StepOutputs:
    """The step's outputs from the residual stream behind the last block; writes `last_token_R`."""
    logits_MV = model.logits(x_MD)
    return outputs_of(logits_MV, model.kernels.draw_tokens(logits_MV, draw), request_rows_M, last_token_R)

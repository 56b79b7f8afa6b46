"""A language model as a list of depths over shared weights and pooled memory.

Shapes: L tokens of a prefill, M tokens whose logits are wanted, B rows of a decode, N any of M, B and the nodes of B
draft trees, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, PrefillInputs, StepMemory, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec
from hybrid_runtime.models.block import Block, apply_norm, scale
from hybrid_runtime.models.mixers import AttentionMixer, Mixer, MixerMemory, RecurrentMixer
from hybrid_runtime.models.rollback import Rollback
from hybrid_runtime.models.spec import ModelSpec
from hybrid_runtime.models.weights import Linear, ModelWeights, map_linears
from hybrid_runtime.ops.kernels import REFERENCE, Kernels
from hybrid_runtime.ops.ragged import state_dtype_for


@dataclass(frozen=True)
class _Place:
    """Where one mixer at one depth finds its memory: the index in its own pool."""

    mixer: Mixer
    index: int

    def memory(self, memory: StepMemory) -> MixerMemory:
        if isinstance(self.mixer, AttentionMixer):
            return MixerMemory(memory.kv_layers[self.index], memory.req_to_token)
        records = memory.record_layers[self.index] if memory.record_layers else {}
        return MixerMemory(memory.state_layers[self.index], memory.req_to_token, records)


class HybridModel:
    """Executes a `ModelSpec` on given weights, which it shares. Stateless: all memory comes with each call.

    Memory is numbered by depth: the d-th attention of the model (first to last block, branches in order) uses
    `StepMemory.kv_layers[d]`, the d-th recurrent mixer `StepMemory.state_layers[d]`. Either kind may be absent.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, kernels: Kernels = REFERENCE) -> None:
        """`kernels`: the forms of the operations to run."""
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        blocks: dict[str, Block] = {}
        for depth, block_spec in enumerate(spec.blocks):
            key = spec.weights_key(depth)
            known = blocks.setdefault(key, Block(block_spec, weights.blocks[key], kernels))
            if known.spec != block_spec:
                raise ValueError(f"blocks with the shared weights {key!r} have different specs")
        self.blocks: tuple[Block, ...] = tuple(blocks[spec.weights_key(depth)] for depth in range(len(spec.blocks)))
        self._attentions: list[AttentionMixer] = []
        self._recurrents: list[RecurrentMixer] = []
        self._places = tuple(tuple(self._place(mixer) for mixer in block.mixers) for block in self.blocks)

    @torch.no_grad()
    def with_kernels(self, kernels: Kernels) -> HybridModel:
        """The same model on the same weights, with other forms of its operations, and the copies that these want."""
        linears: list[Linear] = []

        def note(linear: Linear) -> Linear:
            linears.append(linear)
            return linear

        map_linears(self.weights, note)
        packed = iter(kernels.pack([linear.weight_OI for linear in linears]))
        weights = map_linears(self.weights, lambda linear: linear._replace(packed=next(packed)))
        return HybridModel(self.spec, weights, kernels)

    @torch.no_grad()
    def repack(self) -> None:
        """Writes the copies of the weights anew, in place, from the weights as they are now."""

        def rewrite(linear: Linear) -> Linear:
            if linear.packed is not None:
                [packed] = self.kernels.pack([linear.weight_OI])
                assert packed is not None
                linear.packed.copy_(packed)
            return linear

        map_linears(self.weights, rewrite)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self.weights.embedding_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding_VD.device

    def kv_layers(self, dtype: torch.dtype | None = None) -> tuple[LayerSpec, ...]:
        """What one KV slot holds, per attention depth; `dtype` of the KV pool (default: the model's)."""
        return tuple(mixer.kv_tensors(dtype or self.dtype) for mixer in self._attentions)

    def state_layers(self, state_dtype: torch.dtype | None = None) -> tuple[LayerSpec, ...]:
        """What one state slot holds, per recurrent depth: conv windows in the model's dtype, states in `state_dtype`
        (default: float32, or float64 for a float64 model).
        """
        state_dtype = state_dtype or state_dtype_for(self.weights.embedding_VD)
        return tuple(mixer.state_tensors(self.dtype, state_dtype) for mixer in self._recurrents)

    def record_layers(
        self, num_nodes: int, rollback: Rollback, state_dtype: torch.dtype | None = None
    ) -> tuple[LayerSpec, ...]:
        """What verifies of trees of `num_nodes` nodes note down of one row, per recurrent depth."""
        state_dtype = state_dtype or state_dtype_for(self.weights.embedding_VD)
        return tuple(m.record_tensors(self.dtype, state_dtype, num_nodes, rollback) for m in self._recurrents)

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs, memory: StepMemory) -> Tensor:
        """Runs a ragged prefill: writes K and V of its tokens and the requested states to the pools in `memory`.

        Returns the logits `[M, V]` at `inputs.logits_tokens_M`, float32 (float64 for a float64 model).
        """
        return self.logits(self.prefill_stream(inputs, memory))

    @torch.no_grad()
    def prefill_stream(self, inputs: PrefillInputs, memory: StepMemory) -> Tensor:
        """As `prefill`, but returns the residual stream `[M, D]` behind the last block."""
        x_LD = self.embed(inputs.token_ids_L)
        *earlier, (last, last_memories) = zip(self.blocks, self.memories(memory), strict=True)
        for block, memories in earlier:
            x_LD = block.prefill(x_LD, inputs, memories)
        if last.mixing is not None:
            x_LD = last.mixing.prefill(x_LD, inputs, last_memories)
        x_MD = x_LD[inputs.logits_tokens_M]  # nothing reads what the last feed-forward makes of the other tokens
        return x_MD if last.feed_forward is None else last.feed_forward.prefill(x_MD)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, memory: StepMemory) -> Tensor:
        """Advances every row by one token: writes its K and V, and updates its state, in the pools in `memory`.

        Returns the logits `[B, V]`, float32 (float64 for a float64 model); those of padding rows mean nothing.
        """
        return self.logits(self.decode_stream(inputs, memory))

    @torch.no_grad()
    def decode_stream(self, inputs: DecodeInputs, memory: StepMemory) -> Tensor:
        """As `decode`, but returns the residual stream `[B, D]` behind the last block."""
        x_BD = self.embed(inputs.token_ids_B)
        for block, memories in zip(self.blocks, self.memories(memory), strict=True):
            x_BD = block.decode(x_BD, inputs, memories)
        return x_BD

    @torch.no_grad()
    def verify_stream(self, inputs: VerifyInputs, memory: StepMemory, rollback: Rollback) -> Tensor:
        """The residual stream `[N, D]` behind the last block, of all nodes of B draft trees, row by row.

        Writes K and V of the nodes, and records; states and windows stay as they are until a `commit`.
        """
        x_ND = self.embed(inputs.token_ids_BT.flatten())
        for block, memories in zip(self.blocks, self.memories(memory), strict=True):
            x_ND = block.verify(x_ND, inputs, memories, rollback)
        return x_ND

    @torch.no_grad()
    def commit(self, inputs: CommitInputs, memory: StepMemory, rollback: Rollback) -> None:
        """Writes the states behind the accepted paths, from the records of the verify of these rows."""
        for block, memories in zip(self.blocks, self.memories(memory), strict=True):
            if block.mixing is not None:
                block.mixing.commit(inputs, memories, rollback)

    def _place(self, mixer: Mixer) -> _Place:
        if isinstance(mixer, AttentionMixer):
            self._attentions.append(mixer)
            return _Place(mixer, len(self._attentions) - 1)
        assert isinstance(mixer, RecurrentMixer)
        self._recurrents.append(mixer)
        return _Place(mixer, len(self._recurrents) - 1)

    def memories(self, memory: StepMemory) -> tuple[tuple[MixerMemory, ...], ...]:
        """Each block's part of the pools, one entry per branch."""
        return tuple(tuple(place.memory(memory) for place in places) for places in self._places)

    def embed(self, token_ids_N: Tensor) -> Tensor:
        """The residual stream `[N, D]` before the first block."""
        return scale(embedding(token_ids_N, self.weights.embedding_VD), self.spec.embedding_multiplier)

    def logits(self, x_ND: Tensor) -> Tensor:
        """Logits `[N, V]` of the residual stream behind the last block."""
        normed_ND = apply_norm(x_ND, self.spec.final_norm, self.weights.final_norm_D)
        logits_NV = self.kernels.linear(normed_ND, *self.weights.lm_head)
        return scale(logits_NV.to(state_dtype_for(logits_NV)), self.spec.logits_multiplier)

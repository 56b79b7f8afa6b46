"""Pools with random contents and random steps over them, for one model in one dtype on one device.

Every row of the table names KV slots of its own, and has a working slot of its own; the other state slots are NaN.

Shapes: B rows, S sequences, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.engine.compiled_steps import CompiledSteps
from hybrid_runtime.engine.steps import EagerSteps, StepOutputs, Steps
from hybrid_runtime.graphs.decode_runner import MODEL_FIELDS, DecodeRunner
from hybrid_runtime.graphs.step_inputs import PrefillInputs, StepMemory, draw_inputs
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.kernels import compiled_kernels
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE, RaggedLayout

MAX_LEN = 160


class Rig:
    """`batch` rows; row and working slot i + 1 belong to request i. Contents are the same for every dtype."""

    def __init__(self, model: HybridModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.kv_pool = Pool(model.kv_layers(), batch * MAX_LEN, model.device)
        self.state_pool = Pool(model.state_layers(), 2 * batch, model.device)
        generator = torch.Generator().manual_seed(0)
        for tensor in self.tensors:
            tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(tensor)
        self.state_pool.fill(torch.arange(batch + 1, 2 * batch + 1, device=model.device), torch.nan)
        slots = torch.randperm(batch * MAX_LEN, generator=generator).int() + 1
        self.table = torch.cat([torch.zeros(1, MAX_LEN, dtype=torch.int32), slots.view(batch, MAX_LEN)])
        self.memory = StepMemory(self.kv_pool.layers, self.state_pool.layers, self.table.to(model.device))
        self.last_token_R = torch.zeros(batch + 1, dtype=torch.int64, device=model.device)
        self._saved = self.contents()

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pool in (self.kv_pool, self.state_pool) for each in pool.layers for tensor in each.values()]

    def contents(self) -> list[Tensor]:
        """Copies of all slots but the null slots, which padding rows write to."""
        return [tensor[1:].clone() for tensor in self.tensors]

    def take(self, other: Rig) -> None:
        """Takes over the first contents of another rig's pools, whatever its dtype."""
        for tensor, theirs in zip(self.tensors, other.tensors, strict=True):
            tensor.copy_(theirs)
        self._saved = self.contents()

    def restore(self) -> None:
        """Puts back what the pools held at first."""
        for tensor, saved in zip(self.tensors, self._saved, strict=True):
            tensor[1:] = saved
        self.last_token_R.zero_()

    def eager(self) -> Steps:
        return EagerSteps(self.model, self.memory, self.last_token_R)

    def compiled(self) -> Steps:
        model = self.model.with_kernels(compiled_kernels(self.model.device))
        return CompiledSteps(model, self.memory, self.last_token_R, report=lambda part: None)

    def runner(self, steps: Steps, *, buckets: tuple[int, ...] | None, capture: bool) -> DecodeRunner:
        return DecodeRunner(
            steps.decode,
            max_batch=self.batch,
            max_context_len=steps.max_context_len,
            device=self.model.device,
            buckets=buckets,
            capture=capture,
        )

    def decode_fields(self, num_rows: int, seed: int) -> NDArray[np.int64]:
        """A step of some requests, in a random order, with contexts of 1 to MAX_LEN tokens."""
        rng = np.random.default_rng(seed)
        rows = rng.permutation(self.batch)[:num_rows] + 1
        lens = rng.integers(1, MAX_LEN + 1, size=num_rows)
        fields = {
            "token_ids_B": rng.integers(0, self.model.spec.vocab_size, size=num_rows),
            "positions_B": lens - 1,
            "kv_slots_B": self.table.numpy()[rows, lens - 1],
            "request_rows_B": rows,
            "context_lens_B": lens,
            "working_slots_B": rows,
        }
        of_model = np.stack([fields[name] for name in MODEL_FIELDS]).astype(np.int64)
        return np.vstack([of_model, self.draw_fields(lens)])

    def draw(self, inputs: PrefillInputs) -> DrawInputs:
        """For a prefill, as a decode has it."""
        lens = inputs.context_lens_S.numpy()
        return draw_inputs(torch.from_numpy(self.draw_fields(lens)).to(self.model.device))

    def draw_fields(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Every third row is greedy, every third has all filters, the others draw from all tokens."""
        kinds = np.arange(len(positions)) % 3
        floats = np.array([[0.0, 0.0, 1.0], [0.8, 0.05, 0.9], [1.3, 0.0, 1.0]])[kinds].T.copy().view(np.int64)
        fields = {
            "temperature_B": floats[0],
            "min_p_B": floats[1],
            "top_k_B": np.where(kinds == 1, 20, 2**62),
            "top_p_B": floats[2],
            "seeds_B": kinds - 1,
            "sample_indices_B": kinds,
            "positions_B": positions,
        }
        return np.stack([fields[name] for name in DrawInputs._fields]).astype(np.int64)

    def prefill_inputs(self, lengths: list[int], seed: int) -> PrefillInputs:
        """Sequences of the first requests, each behind a random number of tokens; logits of their last tokens."""
        rng = np.random.default_rng(seed)
        contexts = np.array([rng.integers(0, MAX_LEN - length + 1) for length in lengths])
        rows = np.arange(1, len(lengths) + 1)
        positions = [context + np.arange(length) for context, length in zip(contexts, lengths, strict=True)]
        slots = [self.table.numpy()[row, position] for row, position in zip(rows, positions, strict=True)]

        def to_device(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(self.model.device)

        total = sum(lengths)
        return PrefillInputs(
            layout=RaggedLayout.build(lengths, chunk_size=DEFAULT_CHUNK_SIZE, device=self.model.device),
            token_ids_L=to_device(rng.integers(0, self.model.spec.vocab_size, size=total)),
            positions_L=to_device(np.concatenate(positions)),
            kv_slots_L=to_device(np.concatenate(slots)),
            request_rows_S=to_device(rows),
            context_lens_S=torch.from_numpy(contexts + np.array(lengths)),
            working_slots_S=to_device(rows),
            state_slots_R=to_device(rows),
            logits_tokens_M=to_device(np.cumsum(lengths) - 1),
            logits_rows_M=to_device(rows),
        )

    def outcome(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[StepOutputs, list[Tensor]]:
        """What a step yields, and what it leaves in the pools, from their first contents on."""
        self.restore()
        outputs = StepOutputs(*(output.clone() for output in run()))
        return outputs, self.contents()

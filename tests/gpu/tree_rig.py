"""Random draft trees over the pools of a `Rig`, with the paths through them that are accepted.

Shapes: B rows, T nodes of a tree, N = B T nodes row by row.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.engine.compiled_steps import CompiledSteps
from hybrid_runtime.engine.steps import EagerSteps, SpeculativeSteps, StepOutputs, Steps, VerifyOutputs
from hybrid_runtime.graphs.commit_runner import CommitRunner
from hybrid_runtime.graphs.step_inputs import CommitInputs
from hybrid_runtime.graphs.verify_runner import DRAW_FIELDS, VerifyRunner
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.rollback import ROLLBACKS
from hybrid_runtime.ops.draft_tree import AcceptedPath
from hybrid_runtime.ops.kernels import compiled_kernels
from tests.gpu.rig import MAX_LEN, Rig

NUM_NODES = 8


@dataclasses.dataclass(frozen=True)
class Round:
    """A verify as `VerifyRunner.run` takes it, and the commit behind it."""

    arrays: dict[str, NDArray[np.int64]]
    commit: CommitInputs


@dataclasses.dataclass(frozen=True)
class Runners:
    verify: VerifyRunner
    commit: CommitRunner


class TreeRig:
    """Steps of one kind of rollback over the pools of `rig`."""

    def __init__(self, rig: Rig, rollback: str) -> None:
        self.rig = rig
        self.speculative = SpeculativeSteps(ROLLBACKS[rollback], NUM_NODES, None)
        layers = rig.model.record_layers(NUM_NODES, self.speculative.rollback)
        plan = RecordPlan(layers, rig.batch + 1, self.speculative.rollback.shared_records)
        self.memory = dataclasses.replace(rig.memory, record_layers=plan.allocate(rig.model.device))

    def eager(self) -> Steps:
        return EagerSteps(self.rig.model, self.memory, self.rig.last_token_R, self.speculative)

    def compiled(self) -> Steps:
        model = self.rig.model.with_kernels(compiled_kernels(self.rig.model.device))
        tensors = self.memory, self.rig.last_token_R
        return CompiledSteps(model, *tensors, self.speculative, report=lambda part: None)

    def runners(self, steps: Steps, *, buckets: tuple[int, ...] | None, capture: bool) -> Runners:
        """`buckets`: None: trees of the size that they have. A commit that replays is not captured."""
        device, batch = self.rig.model.device, self.rig.batch
        is_lazy = self.speculative.rollback.is_lazy
        return Runners(
            VerifyRunner(
                steps.verify,
                max_batch=batch,
                num_nodes=NUM_NODES,
                max_context_len=steps.max_context_len,
                device=device,
                buckets=buckets,
                capture=capture,
            ),
            CommitRunner(
                steps.commit,
                max_batch=batch,
                num_nodes=NUM_NODES,
                device=device,
                buckets=None if is_lazy else buckets,
                capture=capture and not is_lazy,
            ),
        )

    def round(self, num_rows: int, seed: int) -> Round:
        """Trees of 1 to T nodes of some requests, behind contexts of any length; of each a path is accepted, or none.

        Every third row leaves its state where it was, as one that is invalid.
        """
        rng = np.random.default_rng(seed)
        rows = rng.permutation(self.rig.batch)[:num_rows] + 1
        lens = rng.integers(0, MAX_LEN - NUM_NODES + 1, size=num_rows)
        counts = rng.integers(1, NUM_NODES + 1, size=num_rows)
        shape = (num_rows, NUM_NODES)
        node_T = np.arange(NUM_NODES)
        is_own_BT = node_T < counts[:, None]
        parents_BT = np.where(is_own_BT, rng.integers(0, np.maximum(node_T, 1), size=shape), 0)
        depths_BT, bits_BT = np.zeros(shape, np.int64), np.ones(shape, np.int64)
        for node in range(1, NUM_NODES):
            above = np.arange(num_rows), parents_BT[:, node]
            depths_BT[:, node] = depths_BT[above] + 1
            bits_BT[:, node] = bits_BT[above] | 1 << node
        slots_BT = self.rig.table.numpy()[rows[:, None], lens[:, None] + node_T]
        positions_BT = lens[:, None] + depths_BT
        arrays = {
            "request_rows_B": rows,
            "committed_lens_B": lens,
            "working_slots_B": rows,
            "token_ids_BT": np.where(is_own_BT, rng.integers(0, self.rig.model.spec.vocab_size, size=shape), 0),
            "positions_BT": positions_BT,
            "kv_slots_BT": np.where(is_own_BT, slots_BT, 0),
            "parents_BT": parents_BT,
            "depths_BT": depths_BT,
            "ancestor_bits_BT": bits_BT,
            **dict(zip(DRAW_FIELDS, self.rig.draw_fields(positions_BT.flatten()), strict=True)),
        }
        nodes_BT, num_nodes_B = np.zeros(shape, np.int64), np.zeros(num_rows, np.int64)
        for place in range(num_rows):
            if place % 3 < 2:
                path = np.flatnonzero(bits_BT[place, rng.integers(counts[place])] >> node_T & 1)
                nodes_BT[place, : len(path)], num_nodes_B[place] = path, len(path)
        tensors = [torch.from_numpy(values.astype(np.int64)) for values in (rows, rows, rows, nodes_BT, num_nodes_B)]
        return Round({n: a.astype(np.int64) for n, a in arrays.items()}, _commit_inputs(*tensors))

    def outcome(self, runners: Runners, one: Round) -> tuple[StepOutputs, list[Tensor]]:
        """What a verify and its commit yield, and leave in the pools, from their first contents on; then the hidden
        states."""
        self.rig.restore()
        for layer in self.memory.record_layers:
            for record in layer.values():
                record.zero_()
        outputs = VerifyOutputs(*(output.clone() for output in runners.verify.run(one.arrays)))
        runners.commit.run(one.commit)
        return StepOutputs(*outputs[:3]), [*self.rig.contents(), outputs.hidden_ND]


def _commit_inputs(
    rows_B: Tensor, working_slots_B: Tensor, destinations_B: Tensor, nodes_BT: Tensor, num_nodes_B: Tensor
) -> CommitInputs:
    return CommitInputs(rows_B, working_slots_B, destinations_B, AcceptedPath(nodes_BT, num_nodes_B))

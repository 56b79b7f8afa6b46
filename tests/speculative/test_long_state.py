"""States after many rounds: what decoding the accepted tokens one by one gives, within its own rounding.

On models of one recurrent layer, whose trees and accepted paths are drawn at random.

Shapes: B rows, T nodes of a draft tree, W conv width, D channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, StepMemory, VerifyInputs
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.rollback import ROLLBACKS, Rollback
from hybrid_runtime.ops.draft_tree import AcceptedPath, draft_tree
from tests.parity.zoo import CASES, LINEAR

NUM_NODES, VOCAB = 5, 150
ONE_LAYER: dict[str, dict[str, Any]] = {
    "kimi": {"mlp_layer_types": ["dense"]},
    "granite-nope": {},
    "qwen": {"mlp_only_layers": [0]},
}
Nodes = NDArray[np.int64]


@cache
def model_of(name: str, dtype: torch.dtype) -> HybridModel:
    case = next(case for case in CASES if case.name == name)
    options = {**case.options, "num_hidden_layers": 1, "layer_types": [LINEAR], **ONE_LAYER[name]}
    model = dataclasses.replace(case, options=options).build()
    return adapt(model.double() if dtype == torch.float64 else model)


class Rounds:
    """Rows of one model in pools of their own: row i has row i + 1 of the request table, and state slot i + 1."""

    def __init__(self, name: str, dtype: torch.dtype, num_rows: int, rollback: Rollback | None = None) -> None:
        self.model = model_of(name, dtype)
        self.rollback = rollback
        self.num_rows = num_rows
        self.pool = Pool(self.model.state_layers(), num_rows)
        self.pool.clear(torch.arange(num_rows + 1))
        records: Any = ()
        if rollback is not None:
            layers = self.model.record_layers(NUM_NODES, rollback)
            records = RecordPlan(layers, num_rows + 1, rollback.shared_records).allocate(torch.device("cpu"))
        self.memory = StepMemory((), self.pool.layers, torch.zeros(num_rows + 1, 1, dtype=torch.int32), records)
        self.rows_B = torch.arange(1, num_rows + 1)

    def round(self, tokens_BT: Nodes, parents_BT: Nodes, paths: list[list[int]]) -> None:
        """A verify of trees and the commit of a path through each, which may be empty."""
        assert self.rollback is not None
        tree = draft_tree(torch.from_numpy(parents_BT))
        zeros_BT = torch.zeros(tokens_BT.shape, dtype=torch.int64)
        verify = VerifyInputs(
            torch.from_numpy(tokens_BT), zeros_BT, zeros_BT, self.rows_B, zeros_BT[:, 0], 1, self.rows_B, tree
        )
        self.model.verify_stream(verify, self.memory, self.rollback)
        nodes_BL = torch.zeros(self.num_rows, max(1, *map(len, paths)), dtype=torch.int64)
        for row, path in enumerate(paths):
            nodes_BL[row, : len(path)] = torch.tensor(path, dtype=torch.int64)
        before_BWD = self.window.clone()
        accepted = AcceptedPath(nodes_BL, torch.tensor([len(path) for path in paths]))
        self.model.commit(CommitInputs(self.rows_B, self.rows_B, self.rows_B, accepted), self.memory, self.rollback)
        self._check_windows(before_BWD, paths)

    def decode(self, token: int) -> None:
        """One token of the only row."""
        zero = torch.zeros(1, dtype=torch.int64)
        inputs = DecodeInputs(torch.tensor([token]), zero, zero, self.rows_B, zero + 1, 1, self.rows_B)
        self.model.decode_stream(inputs, self.memory)

    @property
    def window(self) -> Tensor:
        return self.pool.layers[0]["conv"][1:]

    @property
    def state(self) -> Tensor:
        [name] = self.pool.layers[0].keys() - {"conv"}
        return self.pool.layers[0][name][1:]

    def _check_windows(self, before_BWD: Tensor, paths: list[list[int]]) -> None:
        """Bit by bit the last inputs that were recorded along the path."""
        recorded = self.memory.record_layers[0]["conv_inputs"]
        for row, path in enumerate(paths):
            inputs = torch.cat([before_BWD[row], recorded[row + 1, torch.tensor(path, dtype=torch.int64)]])
            assert torch.equal(self.window[row], inputs[len(inputs) - len(before_BWD[row]) :])


def random_rounds(num_rounds: int, num_rows: int, seed: int) -> Iterator[tuple[Nodes, Nodes, list[list[int]]]]:
    """Tokens, parents and accepted paths; now and then a row accepts nothing, as one with an error does."""
    rng = np.random.default_rng(seed)
    for _ in range(num_rounds):
        tokens_BT = rng.integers(0, VOCAB, (num_rows, NUM_NODES))
        parents_BT = np.stack([rng.integers(0, np.maximum(np.arange(NUM_NODES), 1)) for _ in range(num_rows)])
        paths = []
        for parents_T in parents_BT:
            path, node = [], int(rng.integers(-1, NUM_NODES))
            while node > 0:
                path.append(node)
                node = int(parents_T[node])
            paths.append([] if node < 0 else [0, *reversed(path)])
        yield tokens_BT, parents_BT, paths


def error(state: Tensor, truth: Tensor) -> float:
    return float((state.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("name", "rollback"), [("kimi", "fold"), ("granite-nope", "replay"), ("qwen", "fold")])
def test_a_thousand_rounds_err_no_more_than_twice_what_steps_err(name: str, rollback: str) -> None:
    """Against float64; the largest error at any hundredth round."""
    rounds = Rounds(name, torch.float32, 1, ROLLBACKS[rollback])
    steps, truth = Rounds(name, torch.float32, 1), Rounds(name, torch.float64, 1)
    errors = []
    for index, (tokens_BT, parents_BT, paths) in enumerate(random_rounds(1000, 1, seed=1)):
        rounds.round(tokens_BT, parents_BT, paths)
        for node in paths[0]:
            steps.decode(int(tokens_BT[0, node]))
            truth.decode(int(tokens_BT[0, node]))
        if index % 100 == 99:
            errors.append((error(rounds.state, truth.state), error(steps.state, truth.state)))
    largest, allowed = (max(column) for column in zip(*errors, strict=True))
    assert 0 < largest <= 2 * allowed


@pytest.mark.parametrize("name", ONE_LAYER)
def test_the_three_rollbacks_agree(name: str) -> None:
    """In float64, where what rounding leaves is far below what a wrong path would."""
    runs = {key: Rounds(name, torch.float64, 3, rollback) for key, rollback in ROLLBACKS.items()}
    for given in random_rounds(60, 3, seed=2):
        for rounds in runs.values():
            rounds.round(*given)
    for key in ("snapshot", "replay"):
        assert torch.equal(runs[key].window, runs["fold"].window)
        assert error(runs[key].state, runs["fold"].state) < 1e-13
    assert float(runs["fold"].state.abs().max()) > 1e-2

"""How a recurrent layer verifies draft trees without harm to its state, and how the accepted paths get into it.

Three ways, equal in what they yield. They differ in what they note down, and in when the state is written:

- fold: nodes get their outputs from the committed state alone; keys, updates and decays of all nodes are noted, and one
  product per layer adds those of the accepted path to the state.
- snapshot: the state behind every node is kept, in every layer; the one behind the last accepted node is copied.
- replay: the states behind the nodes go to a buffer that all layers share; inputs are noted, and before the state is
  read next the accepted ones run again.

Shapes: B rows, T nodes of a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import CommitInputs, VerifyInputs
from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, write_committed

NODE_STATES = "node_states"
Values = Mapping[str, Tensor]


class TreeForms(ABC):
    """One mixer's recurrence over draft trees. `operands` are the mixer's own, `[B, T, ...]` where nodes differ."""

    @abstractmethod
    def fold_tensors(self, state_dtype: torch.dtype) -> LayerSpec:
        """What of a node a fold reads."""

    @abstractmethod
    def replay_tensors(self, state_dtype: torch.dtype) -> LayerSpec:
        """What of a node a replay reads."""

    @abstractmethod
    def tree(self, operands: Any, pool: Tensor, slots_B: Tensor, tree: DraftTree) -> tuple[Tensor, Values]:
        """Outputs of all nodes, and what a fold reads of them."""

    @abstractmethod
    def fold(self, noted: Values, pool: Tensor, slots_B: Tensor, destinations_B: Tensor, path: AcceptedPath) -> None:
        """Writes the states behind the paths."""

    @abstractmethod
    def tree_states(self, operands: Any, pool: Tensor, slots_B: Tensor, tree: DraftTree, node_states: Tensor) -> Tensor:
        """Outputs of all nodes; writes the state behind each to `node_states` `[B or more, T or more, ...]`."""

    @abstractmethod
    def replayable(self, operands: Any) -> Values:
        """What a replay reads of the nodes."""

    @abstractmethod
    def replay(self, noted: Values, pool: Tensor, slots_B: Tensor) -> None:
        """Advances the states at `slots_B` (0: none) by one node each, `[B, ...]`."""


class Rollback(ABC):
    """One way. Records are named tensors `[rows + 1, T, ...]`, indexed by rows of the request table."""

    is_lazy: ClassVar[bool] = False  # whether states lag behind until they are read next
    shared_records: ClassVar[frozenset[str]] = frozenset()  # one tensor serves all layers

    @abstractmethod
    def record_tensors(self, forms: TreeForms, state: TensorSpec) -> LayerSpec:
        """What is noted down of a node in one layer whose state is like `state`."""

    @abstractmethod
    def verify(self, forms: TreeForms, operands: Any, pool: Tensor, inputs: VerifyInputs, records: Values) -> Tensor:
        """Outputs `[B, T, ...]` of all nodes; writes `records` alone."""

    @abstractmethod
    def commit(self, forms: TreeForms, pool: Tensor, inputs: CommitInputs, records: Values) -> None:
        """Writes the states behind the accepted paths."""


class Fold(Rollback):
    def record_tensors(self, forms: TreeForms, state: TensorSpec) -> LayerSpec:
        return forms.fold_tensors(state.dtype)

    def verify(self, forms: TreeForms, operands: Any, pool: Tensor, inputs: VerifyInputs, records: Values) -> Tensor:
        y_BT, noted = forms.tree(operands, pool, inputs.working_slots_B, inputs.tree)
        note(records, noted, inputs.request_rows_B)
        return y_BT

    def commit(self, forms: TreeForms, pool: Tensor, inputs: CommitInputs, records: Values) -> None:
        noted, path = accepted({name: records[name] for name in forms.fold_tensors(pool.dtype)}, inputs)
        forms.fold(noted, pool, inputs.working_slots_B, inputs.destinations_B, path)


class Snapshot(Rollback):
    def record_tensors(self, forms: TreeForms, state: TensorSpec) -> LayerSpec:
        return {NODE_STATES: state}

    def verify(self, forms: TreeForms, operands: Any, pool: Tensor, inputs: VerifyInputs, records: Values) -> Tensor:
        # By the place in the batch, which is the commit's, too: states are written where they stay. Not as a slice:
        # code that is compiled for an example that fills the records would take all trees for as large.
        return forms.tree_states(operands, pool, inputs.working_slots_B, inputs.tree, records[NODE_STATES])

    def commit(self, forms: TreeForms, pool: Tensor, inputs: CommitInputs, records: Values) -> None:
        last_B1 = (inputs.path.num_nodes_B - 1).clamp(min=0)[:, None]
        last_B = inputs.path.nodes_BT.gather(1, last_B1)[:, 0]
        place_B = torch.arange(last_B.shape[0], device=last_B.device)
        write_committed(pool, inputs.destinations_B, records[NODE_STATES][place_B, last_B], inputs.path)


class Replay(Rollback):
    is_lazy = True
    shared_records = frozenset({NODE_STATES})

    def record_tensors(self, forms: TreeForms, state: TensorSpec) -> LayerSpec:
        return {NODE_STATES: state, **forms.replay_tensors(state.dtype)}

    def verify(self, forms: TreeForms, operands: Any, pool: Tensor, inputs: VerifyInputs, records: Values) -> Tensor:
        note(records, forms.replayable(operands), inputs.request_rows_B)
        return forms.tree_states(operands, pool, inputs.working_slots_B, inputs.tree, records[NODE_STATES])

    def commit(self, forms: TreeForms, pool: Tensor, inputs: CommitInputs, records: Values) -> None:
        write_committed(pool, inputs.destinations_B, pool[inputs.working_slots_B], inputs.path)
        noted, path = accepted({name: records[name] for name in forms.replay_tensors(pool.dtype)}, inputs)
        for place in range(path.nodes_BT.shape[1]):
            slots_B = torch.where(place < path.num_nodes_B, inputs.destinations_B, 0)
            forms.replay({name: value_BL[:, place] for name, value_BL in noted.items()}, pool, slots_B)


ROLLBACKS: Mapping[str, Rollback] = {"fold": Fold(), "snapshot": Snapshot(), "replay": Replay()}


def accepted(records: Values, inputs: CommitInputs) -> tuple[Values, AcceptedPath]:
    """What the accepted nodes left, `[B, L, ...]` in path order, L of the longest path; and these as a path."""
    nodes_BL = inputs.path.nodes_BT
    of_path = {name: record[inputs.request_rows_B[:, None], nodes_BL] for name, record in records.items()}
    place_BL = torch.arange(nodes_BL.shape[1], device=nodes_BL.device).expand_as(nodes_BL)
    return of_path, AcceptedPath(place_BL, inputs.path.num_nodes_B)


def note(records: Values, noted: Values, request_rows_B: Tensor) -> None:
    """Writes what the nodes of some rows leave, `[B, T, ...]`, to the records of these rows.

    T may be less than the records hold. Padding rows write to row 0.
    """
    for name, value_BT in noted.items():
        record = records[name]
        num_nodes = value_BT.shape[1]
        node_T = torch.arange(num_nodes, device=value_BT.device)
        record.index_put_((request_rows_B[:, None], node_T), value_BT.to(record.dtype))

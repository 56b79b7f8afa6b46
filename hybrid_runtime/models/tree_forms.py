"""The recurrences of the mixers over draft trees, with what each kind of rollback needs of them.

Shapes: B rows, T nodes of a tree, G key heads or groups, H heads, K key dim, V value dim, P head dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.memory.pools import LayerSpec, TensorSpec
from hybrid_runtime.models.rollback import TreeForms, Values
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree
from hybrid_runtime.ops.ragged import state_dtype_for


def decay_rate(log_decay_rate_H: Tensor) -> Tensor:
    """Mamba-2's `a`, in state arithmetic."""
    return -log_decay_rate_H.to(state_dtype_for(log_decay_rate_H)).exp()


@dataclass(frozen=True, eq=False)
class Mamba2Forms(TreeForms):
    """Operands: x, dt, a, b, c, as `ops.mamba2_tree` names them."""

    tree_op: Callable[..., Tensor]
    fold_op: Callable[..., None]
    states_op: Callable[..., Tensor]
    step_op: Callable[..., Tensor]
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    log_decay_rate_H: Tensor

    def fold_tensors(self, state_dtype: torch.dtype) -> LayerSpec:
        return {
            "x": TensorSpec((self.num_heads, self.head_dim), state_dtype),
            "dt": TensorSpec((self.num_heads,), state_dtype),
            "b": TensorSpec((self.num_groups, self.state_dim), state_dtype),
        }

    def replay_tensors(self, state_dtype: torch.dtype) -> LayerSpec:
        return self.fold_tensors(state_dtype)

    def tree(self, operands: Any, pool: Tensor, slots_B: Tensor, tree: DraftTree) -> tuple[Tensor, Values]:
        return self.tree_op(*operands, pool, slots_B, tree), self.replayable(operands)

    def fold(self, noted: Values, pool: Tensor, slots_B: Tensor, destinations_B: Tensor, path: AcceptedPath) -> None:
        a_H = decay_rate(self.log_decay_rate_H)
        self.fold_op(pool, slots_B, destinations_B, noted["dt"], a_H, noted["x"], noted["b"], path)

    def tree_states(self, operands: Any, pool: Tensor, slots_B: Tensor, tree: DraftTree, node_states: Tensor) -> Tensor:
        return self.states_op(*operands, pool, slots_B, tree, node_states)

    def replayable(self, operands: Any) -> Values:
        x_BTHP, dt_BTH, _, b_BTGS, _ = operands
        return {"x": x_BTHP, "dt": dt_BTH, "b": b_BTGS}

    def replay(self, noted: Values, pool: Tensor, slots_B: Tensor) -> None:
        b_BGS = noted["b"]  # in c's place, too: outputs are not read
        a_H = decay_rate(self.log_decay_rate_H)
        self.step_op(noted["x"], noted["dt"], a_H, b_BGS, b_BGS, pool, slots_B)


@dataclass(frozen=True, eq=False)
class DeltaForms(TreeForms):
    """Operands: query, key, value, log_a, beta, as `ops.gdn_tree` and `ops.kda_tree` name them."""

    tree_op: Callable[..., tuple[Tensor, Tensor]]
    fold_op: Callable[..., None]
    states_op: Callable[..., Tensor]
    step_op: Callable[..., Tensor]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    decay_shape: tuple[int, ...]  # of a node

    def fold_tensors(self, state_dtype: torch.dtype) -> LayerSpec:
        return {
            "k": TensorSpec((self.num_key_heads, self.key_dim), state_dtype),
            "u": TensorSpec((self.num_value_heads, self.value_dim), state_dtype),
            "log_a": TensorSpec(self.decay_shape, state_dtype),
        }

    def replay_tensors(self, state_dtype: torch.dtype) -> LayerSpec:
        return {
            "k": TensorSpec((self.num_key_heads, self.key_dim), state_dtype),
            "v": TensorSpec((self.num_value_heads, self.value_dim), state_dtype),
            "log_a": TensorSpec(self.decay_shape, state_dtype),
            "beta": TensorSpec((self.num_value_heads,), state_dtype),
        }

    def tree(self, operands: Any, pool: Tensor, slots_B: Tensor, tree: DraftTree) -> tuple[Tensor, Values]:
        y_BTHV, u_BTHV = self.tree_op(*operands, pool, slots_B, tree)
        _, k_BTGK, _, log_a_BT, _ = operands
        return y_BTHV, {"k": k_BTGK, "u": u_BTHV, "log_a": log_a_BT}

    def fold(self, noted: Values, pool: Tensor, slots_B: Tensor, destinations_B: Tensor, path: AcceptedPath) -> None:
        self.fold_op(pool, slots_B, destinations_B, noted["k"], noted["u"], noted["log_a"], path)

    def tree_states(self, operands: Any, pool: Tensor, slots_B: Tensor, tree: DraftTree, node_states: Tensor) -> Tensor:
        return self.states_op(*operands, pool, slots_B, tree, node_states)

    def replayable(self, operands: Any) -> Values:
        _, k_BTGK, v_BTHV, log_a_BT, beta_BTH = operands
        return {"k": k_BTGK, "v": v_BTHV, "log_a": log_a_BT, "beta": beta_BTH}

    def replay(self, noted: Values, pool: Tensor, slots_B: Tensor) -> None:
        k_BGK = noted["k"]  # in the query's place, too: outputs are not read
        self.step_op(k_BGK, k_BGK, noted["v"], noted["log_a"], noted["beta"], pool, slots_B)

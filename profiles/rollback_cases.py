"""Draft trees, and the recurrent layers whose states they are verified over and committed to, at the sizes of models.

Shapes: B rows, T nodes of a tree, G groups or key heads, H heads; a state's dims are P, N (Mamba-2) or V, K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybrid_runtime.ops import cpu_kernels
from hybrid_runtime.ops.cpu_kernels import tree_twins
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree


def chain(num_nodes: int) -> list[int]:
    """The parent of every node, that of the root being the root."""
    return [max(0, node - 1) for node in range(num_nodes)]


def topk_tree(num_nodes: int, topk: int, num_steps: int) -> list[int]:
    """As a drafter that expands the `topk` best nodes of each step by `topk` candidates builds it, cut to `num_nodes`.

    Raises ValueError if there are fewer candidates.
    """
    parents, frontier = [0], [0]
    for _ in range(num_steps):
        candidates = []
        for parent in frontier:
            for _ in range(topk):
                candidates.append(len(parents))
                parents.append(parent)
        frontier = candidates[:topk]
    if len(parents) < num_nodes:
        raise ValueError(f"{num_steps} steps of topk {topk} give {len(parents)} nodes, not {num_nodes}")
    return parents[:num_nodes]


def deepest_path(parents: Sequence[int], num_rows: int) -> AcceptedPath:
    """The longest path of a tree, in every row."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    path = [max(range(len(parents)), key=depths.__getitem__)]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    nodes_T = torch.tensor(path + [0] * (len(parents) - len(path)))
    return AcceptedPath(nodes_T.repeat(num_rows, 1), torch.full((num_rows,), len(path)))


@dataclass(frozen=True)
class Sizes:
    groups: int
    heads: int
    value_dim: int
    key_dim: int

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.heads, self.value_dim, self.key_dim


class Layer(ABC):
    """One recurrent layer in its kernels, with operands of all nodes: activations in bfloat16, decays in float32."""

    nodes: tuple[Tensor, ...]

    @abstractmethod
    def verify(self, pool: Tensor, slots_B: Tensor, tree: DraftTree) -> Tensor | None:
        """Outputs of all nodes from the committed states alone; returns u if the layer has one."""

    @abstractmethod
    def fold(self, pool: Tensor, slots_B: Tensor, u_BTHV: Tensor | None, path: AcceptedPath) -> None:
        """The states behind `path`, in place."""

    @abstractmethod
    def write_states(self, pool: Tensor, slots_B: Tensor, tree: DraftTree, node_states: Tensor) -> None:
        """Outputs of all nodes and the states behind them."""

    @abstractmethod
    def step(self, pool: Tensor, slots_B: Tensor, nodes_B: Tensor) -> None:
        """One accepted node of every row, in place."""

    def at(self, nodes_B: Tensor) -> list[Tensor]:
        row_B = torch.arange(len(nodes_B))
        return [x_BT[row_B, nodes_B] for x_BT in self.nodes]


class DeltaLayer(Layer):
    def __init__(self, sizes: Sizes, batch: tuple[int, int], *, per_channel: bool):
        q_BTGK, k_BTGK = (normalize(torch.randn(*batch, sizes.groups, sizes.key_dim), dim=-1) for _ in range(2))
        log_a_BTHK = -(torch.rand(*batch, sizes.heads, sizes.key_dim) ** 6)
        self.nodes = (
            q_BTGK.bfloat16(),
            k_BTGK.bfloat16(),
            torch.randn(*batch, sizes.heads, sizes.value_dim).bfloat16(),
            log_a_BTHK if per_channel else log_a_BTHK[..., 0].contiguous(),
            torch.rand(*batch, sizes.heads),
        )
        self._verify = tree_twins.kda_tree if per_channel else tree_twins.gdn_tree
        self._fold = tree_twins.kda_fold if per_channel else tree_twins.gdn_fold
        self._write_states = tree_twins.kda_tree_states if per_channel else tree_twins.gdn_tree_states
        self._step = cpu_kernels.kda_step if per_channel else cpu_kernels.gdn_step

    def verify(self, pool: Tensor, slots_B: Tensor, tree: DraftTree) -> Tensor:
        q, k, v, log_a, beta = self.nodes
        return self._verify(q, k, v, log_a, beta, pool, slots_B, tree)[1]

    def fold(self, pool: Tensor, slots_B: Tensor, u_BTHV: Tensor | None, path: AcceptedPath) -> None:
        assert u_BTHV is not None
        _, k, _, log_a, _ = self.nodes
        self._fold(pool, slots_B, slots_B, k, u_BTHV, log_a, path)

    def write_states(self, pool: Tensor, slots_B: Tensor, tree: DraftTree, node_states: Tensor) -> None:
        q, k, v, log_a, beta = self.nodes
        self._write_states(q, k, v, log_a, beta, pool, slots_B, tree, node_states)

    def step(self, pool: Tensor, slots_B: Tensor, nodes_B: Tensor) -> None:
        q, k, v, log_a, beta = self.at(nodes_B)
        self._step(q, k, v, log_a, beta, pool, slots_B)


class Mamba2Layer(Layer):
    def __init__(self, sizes: Sizes, batch: tuple[int, int]):
        self.a_H = -torch.rand(sizes.heads)
        self.nodes = (
            torch.randn(*batch, sizes.heads, sizes.value_dim).bfloat16(),
            torch.rand(*batch, sizes.heads),
            torch.randn(*batch, sizes.groups, sizes.key_dim).bfloat16(),
            torch.randn(*batch, sizes.groups, sizes.key_dim).bfloat16(),
        )

    def verify(self, pool: Tensor, slots_B: Tensor, tree: DraftTree) -> None:
        x, dt, b, c = self.nodes
        tree_twins.mamba2_tree(x, dt, self.a_H, b, c, pool, slots_B, tree)

    def fold(self, pool: Tensor, slots_B: Tensor, u_BTHV: Tensor | None, path: AcceptedPath) -> None:
        x, dt, b, _ = self.nodes
        tree_twins.mamba2_fold(pool, slots_B, slots_B, dt, self.a_H, x, b, path)

    def write_states(self, pool: Tensor, slots_B: Tensor, tree: DraftTree, node_states: Tensor) -> None:
        x, dt, b, c = self.nodes
        tree_twins.mamba2_tree_states(x, dt, self.a_H, b, c, pool, slots_B, tree, node_states)

    def step(self, pool: Tensor, slots_B: Tensor, nodes_B: Tensor) -> None:
        x, dt, b, c = self.at(nodes_B)
        cpu_kernels.mamba2_step(x, dt, self.a_H, b, c, pool, slots_B)


# Kimi-Linear; Qwen3-Next; Nemotron-H.
SIZES = {
    "kda": Sizes(groups=32, heads=32, value_dim=128, key_dim=128),
    "gdn": Sizes(groups=16, heads=32, value_dim=128, key_dim=128),
    "mamba2": Sizes(groups=8, heads=128, value_dim=64, key_dim=128),
}
SMALL_SIZES = {op: Sizes(groups=1, heads=2, value_dim=16, key_dim=16) for op in SIZES}


def make_layer(op: str, sizes: Sizes, num_rows: int, num_nodes: int) -> Layer:
    batch = (num_rows, num_nodes)
    if op == "mamba2":
        return Mamba2Layer(sizes, batch)
    return DeltaLayer(sizes, batch, per_channel=op == "kda")

"""A tree of drafted tokens and the path through it that was accepted, and how tree forms read and write by them.

Node 0 is the root: the last sampled token, which is not in the KV cache or the state yet. A row with fewer than T nodes
is filled up with children of the root that are never accepted.

Shapes: B rows, T nodes of a tree (root included), S places that nodes see, H heads; also I a node, J one that it sees
(itself or an ancestor), M one on the way from behind J to I.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """One tree per row, on one device."""

    parents_BT: Tensor  # int64; that of a node i > 0 is below i, that of the root is the root
    depths_BT: Tensor  # int64; 0 for the root
    ancestors_BTT: Tensor  # bool; at (i, j): j is i or an ancestor of i


class AcceptedPath(NamedTuple):
    """The accepted nodes of each row, from the root down; none in a row that is padding or has nothing to commit."""

    nodes_BT: Tensor  # int64; 0 behind the last
    num_nodes_B: Tensor  # int64; the root counts


def draft_tree(parents_BT: Tensor) -> DraftTree:
    """The tree in which node i hangs on `parents_BT[:, i]` (int64, below i; 0 for the root).

    ceil(log2 T) dependent steps, each of which doubles how far up a node sees.
    """
    num_nodes = parents_BT.shape[1]
    ancestors_BTT = torch.eye(num_nodes, dtype=torch.bool, device=parents_BT.device).expand(len(parents_BT), -1, -1)
    above_BT = parents_BT
    for _ in range((num_nodes - 1).bit_length()):
        ancestors_BTT = ancestors_BTT | at_nodes(ancestors_BTT, above_BT)
        above_BT = at_nodes(above_BT, above_BT)
    return DraftTree(parents_BT, ancestors_BTT.sum(dim=-1) - 1, ancestors_BTT)


def node_bits(num_nodes: int, device: torch.device) -> Tensor:
    """int64 `[T]`: the bit that stands for each node of at most 64."""
    return torch.tensor(1, device=device) << torch.arange(num_nodes, device=device)


def ancestors_of_bits(bits_BT: Tensor, bit_T: Tensor) -> Tensor:
    """`DraftTree.ancestors_BTT` from a word of bits per node (int64): those of the node and its ancestors.

    `bit_T` `[T]` is that of each node (`node_bits`). Two launches, where `draft_tree` takes steps that wait for each
    other.
    """
    return (bits_BT[..., None] & bit_T) != 0


def at_nodes(x_BT: Tensor, nodes_BT: Tensor) -> Tensor:
    """The entries `[B, T, ...]` of `x_BT` that `nodes_BT` names in each row."""
    row_B1 = torch.arange(x_BT.shape[0], device=x_BT.device)[:, None]
    return x_BT[row_B1, nodes_BT]


def along_path(x_BT: Tensor, path: AcceptedPath) -> Tensor:
    """The entries `[B, T, ...]` of the accepted nodes in path order; zeros behind the last, whatever `x_BT` holds."""
    place_T = torch.arange(x_BT.shape[1], device=x_BT.device)
    is_accepted_BT = place_T < path.num_nodes_B[:, None]
    return torch.where(_broadcast(is_accepted_BT, x_BT), at_nodes(x_BT, path.nodes_BT), 0)


def write_committed(pool: Tensor, destinations_B: Tensor, values_B: Tensor, path: AcceptedPath) -> None:
    """Writes each row's value `[B, ...]` to `pool[destinations_B]`.

    Rows without accepted nodes and rows of destination 0, in any number, write what slot 0 holds to slot 0.
    """
    destinations_B = torch.where(path.num_nodes_B == 0, 0, destinations_B)
    values_B = torch.where(_broadcast(destinations_B != 0, pool), values_B.to(pool.dtype), pool[:1])
    pool.index_put_((destinations_B,), values_B)


def contain_faults(sees_BTS: Tensor, *operands_BS: Tensor) -> tuple[list[Tensor], Tensor]:
    """Keeps numbers that are not finite out of products over places S, in which even a weight of 0 would spread them.

    Returns the operands `[B, S, ...]` with zeros at a place where any of them is not finite, and `[B, T]`: NaN for
    nodes that see such a place, 0 for all others: added to results, it shows the fault where it belongs.
    """
    is_sound_BS = torch.stack([x_BS.isfinite().flatten(2).all(dim=-1) for x_BS in operands_BS]).all(dim=0)
    sound = [x_BS.masked_fill(~_broadcast(is_sound_BS, x_BS), 0) for x_BS in operands_BS]
    is_faulty_BT = (sees_BTS & ~is_sound_BS[:, None]).any(dim=-1)
    return sound, torch.where(is_faulty_BT, torch.nan, 0.0)


def _broadcast(mask: Tensor, x: Tensor) -> Tensor:
    """`mask` with as many axes as `x`, whose first axes it has."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))


def strict_ancestors(tree: DraftTree) -> Tensor:
    """`[B, T, T]` bool: at (i, j) j is an ancestor of i."""
    return tree.ancestors_BTT.tril(-1)


def path_decays(log_a_BHT: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor]:
    """Decays along paths for one `log_a` <= 0 per node and head.

    Returns `[B, H, T]`, from the committed state to behind each node, and `[B, H, T, T]`: at (i, j) from behind j to
    behind i, 0 where j is neither i nor an ancestor of i.

    Each sum is made of its own entries: the difference of two sums from the root would carry the rounding of the longer
    one, which behind a strong decay is as large as the whole exponent.
    """
    path_BHIM = torch.where(tree.ancestors_BTT[:, None], log_a_BHT[:, :, None], 0)
    below_BMJ = strict_ancestors(tree).to(log_a_BHT.dtype)
    between_BHIJ = path_BHIM @ below_BMJ[:, None]
    decay_BHIJ = between_BHIJ.exp().masked_fill(~tree.ancestors_BTT[:, None], 0)
    return path_BHIM.sum(dim=-1).exp(), decay_BHIJ

"""Which drafted tokens stand: one exact rule for greedy and for sampled requests.

The target draws a token behind every node of the tree, with the key that plain decoding would use at that position.
A draft token that equals the draw behind its parent is accepted, so that texts, and hence their distribution, are those
of plain decoding. This matches proposals against the target's own draw (the naive sampling of SpecInfer, Miao et al.
2024, arXiv 2305.09781): one of a node's children is accepted with the sum of the target's probabilities of all.

Shapes: B rows, T nodes of a tree, I a node and J another one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree


def accept_path(
    token_ids_BT: Tensor, num_nodes_B: Tensor, chosen_BT: Tensor, tree: DraftTree, max_accepted_B: Tensor
) -> AcceptedPath:
    """The path from the root along which each node's token is the one chosen behind its parent.

    `token_ids_BT` and `chosen_BT` (int64): a node's token, and the target's token behind it. Of a row's nodes the first
    `num_nodes_B` (int64) are real; a row of none is padding and accepts nothing. At most `max_accepted_B` (int64, at
    least 1) nodes are accepted, the root among them. Of siblings with equal tokens the first counts. A fixed number of
    dependent operations; mutates nothing and never waits for the device.
    """
    node_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
    follows_BT = (token_ids_BT == chosen_BT.gather(1, tree.parents_BT)) & ~_has_elder_twin(token_ids_BT, tree)
    follows_BT = (follows_BT | (node_T == 0)) & (node_T < num_nodes_B[:, None])
    is_led_to_BT = (follows_BT[:, None] | ~tree.ancestors_BTT).all(dim=-1)
    is_accepted_BT = is_led_to_BT & (tree.depths_BT < max_accepted_B[:, None])
    # no two accepted nodes are equally deep
    nodes_BT = torch.zeros_like(tree.parents_BT).scatter_add(1, tree.depths_BT, torch.where(is_accepted_BT, node_T, 0))
    return AcceptedPath(nodes_BT, is_accepted_BT.sum(dim=-1))


def _has_elder_twin(token_ids_BT: Tensor, tree: DraftTree) -> Tensor:
    """Whether an earlier child of the same parent has the same token; the root is nobody's child."""
    is_sibling_BIJ = tree.parents_BT[:, :, None] == tree.parents_BT[:, None, :]
    is_equal_BIJ = token_ids_BT[:, :, None] == token_ids_BT[:, None, :]
    is_twin_BIJ = (is_sibling_BIJ & is_equal_BIJ).tril(-1)
    return is_twin_BIJ[:, :, 1:].any(dim=-1)

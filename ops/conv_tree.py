"""The short convolution over a draft tree: outputs of all nodes from the committed window, and that moved along a path.

Shapes: B rows, T nodes of a tree, D channels, W taps; of a window, W counts W - 1 inputs. As in `ops/conv.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.ops.conv import weigh
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, at_nodes, write_committed


def conv_tree(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, window_pool: Tensor, slots_B: Tensor, tree: DraftTree
) -> Tensor:
    """Outputs `[B, T, D]` in x's dtype: of each node, what steps from `window_pool[slots_B]` along its path yield.

    The taps of a node are its nearest ancestors and, where there are too few, the last inputs of the window
    (`[slots + 1, W - 1, D]`). Nothing is written.
    """
    num_nodes, num_taps = x_BTD.shape[1], weight_DW.shape[1]
    inputs_BID = torch.cat([x_BTD, window_pool[slots_B].to(x_BTD.dtype)], dim=1)
    node_BT = torch.arange(num_nodes, device=x_BTD.device).expand_as(tree.parents_BT)
    taps_BT = []
    for back in range(num_taps):
        # the root's parent is the last input of the window, whose inputs lie behind the nodes, oldest first
        window_BT = num_nodes + (num_taps - 1) + tree.depths_BT - back
        taps_BT.append(torch.where(tree.depths_BT >= back, node_BT, window_BT))
        node_BT = at_nodes(tree.parents_BT, node_BT)
    return weigh((at_nodes(inputs_BID, tap_BT) for tap_BT in reversed(taps_BT)), weight_DW, bias_D).to(x_BTD.dtype)


def conv_fold(window_pool: Tensor, slots_B: Tensor, destinations_B: Tensor, x_BTD: Tensor, path: AcceptedPath) -> None:
    """Writes the window behind the last node of `path`, from `window_pool[slots_B]`, to `window_pool[destinations_B]`.

    `x_BTD` are the inputs that the nodes were verified with; they enter the window as they are. A destination may be
    its row's own slot; those other than 0 must be distinct, and no other row's slot. Rows without accepted nodes or
    with destination 0 change nothing. What rejected nodes hold is not read.
    """
    num_inputs = window_pool.shape[1]
    inputs_BID = torch.cat([window_pool[slots_B].to(x_BTD.dtype), at_nodes(x_BTD, path.nodes_BT)], dim=1)
    last_BW = path.num_nodes_B[:, None] + torch.arange(num_inputs, device=x_BTD.device)
    write_committed(window_pool, destinations_B, at_nodes(inputs_BID, last_BW), path)

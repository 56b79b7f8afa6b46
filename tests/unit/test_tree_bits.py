"""Words of bits say of every node which nodes it sees, up to the largest tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_runtime.engine.verify_batch import _path_to, _paths
from hybrid_runtime.ops.draft_tree import ancestors_of_bits, draft_tree, node_bits
from hybrid_runtime.speculative_config import MAX_NUM_DRAFT_TOKENS


@pytest.mark.parametrize("num_nodes", [1, 2, 9, MAX_NUM_DRAFT_TOKENS])
def test_bits_are_the_nodes_that_each_node_sees(num_nodes: int) -> None:
    """Of random trees, of a chain, whose last node sees all, and of a root with children."""
    rng = np.random.default_rng(num_nodes)
    above_T = np.maximum(np.arange(num_nodes) - 1, 0)
    parents_BT = np.stack([*(rng.integers(0, above_T + 1) for _ in range(4)), above_T, np.zeros_like(above_T)])
    depths_BT, bits_BT = _paths(parents_BT)
    tree = draft_tree(torch.from_numpy(parents_BT))
    unpacked_BTT = ancestors_of_bits(torch.from_numpy(bits_BT), node_bits(num_nodes, torch.device("cpu")))
    assert torch.equal(unpacked_BTT, tree.ancestors_BTT)
    assert torch.equal(torch.from_numpy(depths_BT), tree.depths_BT)
    assert _path_to(num_nodes - 1, bits_BT[4]).tolist() == list(range(num_nodes))

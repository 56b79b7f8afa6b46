"""Sections 9.6, 9.9 and 8.5 of the source document: its draft tree with the root as a node, and the sizes of trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime import SpeculativeConfig
from hybrid_runtime.engine.verifying import accepted_nodes
from hybrid_runtime.ops.draft_tree import draft_tree
from hybrid_runtime.ops.kda import kda_recurrent
from hybrid_runtime.ops.kda_tree import kda_tree_states
from hybrid_runtime.ops.ragged import RaggedLayout
from hybrid_runtime.speculative.draft import Draft, DraftRow, check_draft
from hybrid_runtime.speculative_config import max_num_draft_tokens
from tests.cache.helpers import ints
from tests.examples.speculation_parts import (
    ACCEPTED,
    DOCUMENT_PARENTS,
    PARENTS,
    RIGHT_PATH,
    ROLLBACKS,
    TOLERANCE,
    Rounds,
    ScriptedDrafter,
    finish,
    speculative_runtime,
    start,
    truth_of,
)

PATHS = [[0], [0, 1], [0, 2], [0, 3], *([0, 1, leaf] for leaf in (4, 5, 6)), *([0, 2, leaf] for leaf in (7, 8, 9))]
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 4


Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # query, key, value, log decay, beta


def random_operands(num_nodes: int) -> tuple[Operands, Tensor]:
    """Operands of nodes `[1, T, ...]`, and a pool of two states, in float64."""
    generator = torch.Generator().manual_seed(96)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = (torch.nn.functional.normalize(normal(1, num_nodes, HEADS, KEY_DIM), dim=-1) for _ in range(2))
    decay = -torch.nn.functional.softplus(normal(1, num_nodes, HEADS, KEY_DIM))
    value, beta = normal(1, num_nodes, HEADS, VALUE_DIM), normal(1, num_nodes, HEADS).sigmoid()
    return (query, key, value, decay, beta), normal(2, HEADS, VALUE_DIM, KEY_DIM)


def state_behind(of_nodes: Operands, pool: Tensor, path: list[int]) -> Tensor:
    """By the definition of the recurrence, token by token along the path, from the state in slot 1."""
    q, k, v, log_a, beta = (operand[0, path] for operand in of_nodes)
    _, states = kda_recurrent(q, k, v, log_a, beta, pool[1:], RaggedLayout.build([len(path)]))
    return states[0]


def test_section_9_6_the_parent_array() -> None:
    """The document: `[-1, -1, -1, 0, 0, 0, 1, 1, 1]`; d0, d1, d2 hang on the main state, by -1.

    The last sampled token ("bonus" in its picture) is verified in the same forward, so it is node 0, and all others
    are one further. There is no -1: such an array is refused.
    """
    row = DraftRow(row=1, tokens=ints([5]), max_nodes=9)
    check_draft(Draft(ints(range(10, 19)), ints(PARENTS)), row, vocab_size=20)
    assert PARENTS == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    with pytest.raises(ValueError, match="node 1 with parent -1"):
        check_draft(Draft(ints(range(10, 19)), ints(DOCUMENT_PARENTS)), row, vocab_size=20)

    tree = draft_tree(torch.tensor([[0, *PARENTS]]))
    assert tree.depths_BT.tolist() == [[0, 1, 1, 1, 2, 2, 2, 2, 2, 2]]
    assert [sees.nonzero().flatten().tolist() for sees in tree.ancestors_BTT[0]] == PATHS


def test_section_9_6_the_states_behind_the_nodes() -> None:
    """The document's kernel: step 0 reads the main state for d0, d1, d2, step 1 the buffer of their parents.

    There is a step before these: the root reads the main state, and d0, d1, d2 what it leaves. From the main state
    itself they would miss the last sampled token.
    """
    of_nodes, pool = random_operands(1 + len(PARENTS))
    tree, slots_B = draft_tree(torch.tensor([[0, *PARENTS]])), torch.tensor([1])
    node_states = torch.full((1, 10, HEADS, VALUE_DIM, KEY_DIM), torch.nan, dtype=torch.float64)
    before = pool.clone()
    kda_tree_states(*of_nodes, pool, slots_B, tree, node_states)
    for node, path in enumerate(PATHS):
        expected = state_behind(of_nodes, pool, path)
        torch.testing.assert_close(node_states[0, node], expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(pool, before)
    assert (node_states[0, 1] - state_behind(of_nodes, pool, [1])).abs().max() > 1e-3


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_section_9_6_a_round_over_the_tree(rollback: str) -> None:
    """The tree above in a running request: d1 and d7 are right, so the root and they are kept, in three KV slots.

    The document leaves KV out. Each node writes its own; the accepted ones' slots stay in the request's row, in path
    order, and those of the others are free afterwards.
    """
    truth = truth_of(9, 24)
    with speculative_runtime(rollback, ScriptedDrafter(truth, PARENTS, RIGHT_PATH)) as rt:
        rounds = Rounds(rt)
        start(rt, truth, 9)
        request, row = rounds.request, rounds.request.resident.row
        table = rt._engine.memory.table.slots
        node_slots: list[int] = []
        rounds.after_verify = lambda records: node_slots.extend(table[row, 9:19].tolist())
        [output] = rt.step()
        assert output.outputs[0].token_ids == truth[9:13], "the one sampled before, d1, d7, and the next root"
        assert request.num_computed_tokens == 9 + len(ACCEPTED)
        num_kept = request.resident.num_kv_slots
        assert table[row, 9:num_kept].tolist() == [node_slots[node] for node in ACCEPTED]
        rejected = set(range(10)) - set(ACCEPTED)
        assert all(rt._engine.memory.supply.kv.is_free(node_slots[node]) for node in rejected)
        assert finish(rt) == truth[9:]


@given(data=st.data())
def test_section_9_9_what_is_accepted_is_a_path_from_the_root(data: st.DataObject) -> None:
    """The document: the verdict cannot jump. So it is for any tree and any choice of the target."""
    num_nodes = data.draw(st.integers(1, 12))
    tokens = st.lists(st.integers(0, 3), min_size=num_nodes, max_size=num_nodes)
    parents = [0, *(data.draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    token_ids, chosen = data.draw(tokens), data.draw(tokens)
    path = accepted_nodes(
        np.array(token_ids),
        np.array(parents),
        np.array(chosen),
        end_token_ids=frozenset(),
        max_accepted=num_nodes,
    )
    assert path[0] == 0
    assert [parents[node] for node in path[1:]] == path[:-1]
    assert [token_ids[node] for node in path[1:]] == [chosen[node] for node in path[:-1]]
    children = [node for node in range(1, num_nodes) if parents[node] == path[-1]]
    assert all(token_ids[node] != chosen[path[-1]] for node in children), "it goes on as long as it can"


def test_section_8_5_the_sizes_of_trees() -> None:
    """The document: 3 steps give 3, 7 or 63 draft tokens at topk 1, 2 or 4.

    The first step gives topk candidates, each later one topk²: with the root 4, 11 and 37 nodes at most. Fewer are
    a choice, such as 7; 63 needs 5 steps at topk 4.
    """
    assert [max_num_draft_tokens(topk, 3) for topk in (1, 2, 4)] == [4, 11, 37]
    assert SpeculativeConfig("mtp", topk=1, num_steps=3).tree_size == 4
    assert SpeculativeConfig("mtp", topk=2, num_steps=3, num_draft_tokens=7).tree_size == 7
    for num_steps in (3, 4):
        with pytest.raises(ValueError, match="num_draft_tokens=63 is more than a tree of topk=4"):
            SpeculativeConfig("mtp", topk=4, num_steps=num_steps, num_draft_tokens=63)
    assert SpeculativeConfig("mtp", topk=4, num_steps=5, num_draft_tokens=63).tree_size == 63

"""What does not fit is refused with ValueError by the kernels over draft trees, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from hybrid_runtime.ops.draft_tree import AcceptedPath
from tests.ops.cpu_kernels.tree_updates import F32, OPS, case_of, in_kernel
from tests.ops.recurrent_trees import Dims, TreeCase
from tests.ops.tree_cases import path_to_ends, same_bits

every_op = pytest.mark.parametrize("op", OPS, ids=repr)
Change = Callable[[TreeCase], TreeCase]


def parents(case: TreeCase, row: int, node: int, parent: int) -> TreeCase:
    parents_BT = case.tree.parents_BT.clone()
    parents_BT[row, node] = parent
    return replace(case, tree=case.tree._replace(parents_BT=parents_BT))


def float_parents(case: TreeCase) -> TreeCase:
    return replace(case, tree=case.tree._replace(parents_BT=case.tree.parents_BT.float()))


def node_operand(case: TreeCase, index: int, change: Callable[[Tensor], Tensor]) -> TreeCase:
    nodes = list(case.nodes)
    nodes[index] = change(nodes[index])
    return replace(case, nodes=tuple(nodes))


VERIFY: list[tuple[Change, str]] = [
    (lambda case: parents(case, 0, 3, 3), r"parents_BT\[0, 3\] is 3, which is no node before it"),
    (lambda case: parents(case, 2, 0, 1), r"parents_BT\[2, 0\] is 1"),
    (lambda case: parents(case, 1, 2, -1), r"parents_BT\[1, 2\] is -1"),
    (float_parents, "parents_BT must be of dtype int64"),
    (lambda case: replace(case, slots_B=case.slots_B + 100), "which is no slot of a pool of 8"),
    (lambda case: replace(case, slots_B=-case.slots_B), "which is no slot"),
    (lambda case: replace(case, slots_B=case.slots_B.int()), "slots_B must be of dtype int64"),
    (lambda case: replace(case, slots_B=case.slots_B[:-1]), "must have size 2 on axis 0"),
    (lambda case: replace(case, pool=case.pool[0]), "state_pool must have 4 axes, not 3"),
    (lambda case: replace(case, pool=case.pool.mT.contiguous().mT), "state_pool must be contiguous behind"),
    (lambda case: node_operand(case, 0, lambda x: x[..., :-1]), "must have size"),
    (lambda case: node_operand(case, 2, lambda x: x[:, :-1]), "must have size"),
    (lambda case: node_operand(case, 1, lambda x: x[:-1]), "must have size"),
]


@every_op
@pytest.mark.parametrize(("change", "complaint"), VERIFY)
def test_verify(op, change: Change, complaint: str) -> None:
    case = change(in_kernel(case_of(op, "random", 5, Dims()).to(F32, F32)))
    with pytest.raises(ValueError, match=complaint):
        case.verify()


def place(path: AcceptedPath, row: int, at: int, node: int) -> AcceptedPath:
    nodes_BT = path.nodes_BT.clone()
    nodes_BT[row, at] = node
    return path._replace(nodes_BT=nodes_BT)


FOLD: list[tuple[Callable[[AcceptedPath], AcceptedPath], Callable[[Tensor], Tensor], str]] = [
    (lambda path: path._replace(num_nodes_B=path.num_nodes_B + 4), lambda slots: slots, "not in 0..5"),
    (lambda path: path._replace(num_nodes_B=-path.num_nodes_B), lambda slots: slots, "not in 0..5"),
    (lambda path: path._replace(num_nodes_B=path.num_nodes_B.int()), lambda slots: slots, "must be of dtype int64"),
    (lambda path: place(path, 0, 1, 5), lambda slots: slots, r"path.nodes_BT\[0, 1\] is 5, which is no node"),
    (lambda path: place(path, 0, 1, -1), lambda slots: slots, r"path.nodes_BT\[0, 1\] is -1"),
    (lambda path: path, lambda slots: slots + 100, "which is no slot of a pool of 8"),
    (lambda path: path, lambda slots: slots[:-1], "destinations_B must have size 3"),
    (lambda path: path, lambda slots: slots[[2, 1, 2]], "is written for row 0 and used by row 2"),
    (lambda path: path, lambda slots: slots[[2, 1, 0]], "is written for row 0 and used by row 2"),
]


@every_op
@pytest.mark.parametrize(("change_path", "change_slots", "complaint"), FOLD)
def test_fold(op, change_path, change_slots, complaint: str) -> None:
    case = in_kernel(case_of(op, "chain", 5, Dims()).to(F32, F32))
    _, u_BT = case.verify()
    path = change_path(path_to_ends(case.parents, [3, 2, 4]))
    before = case.pool.clone()
    with pytest.raises(ValueError, match=complaint):
        case.fold(u_BT, change_slots(case.slots_B), path)
    assert same_bits(case.pool, before)


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_heads_that_no_group_has(op) -> None:
    case = in_kernel(case_of(op, "random", 5, Dims(groups=2, copies=2)).to(F32, F32))
    for index in (0, 1) if hasattr(op, "name") else (2, 3):
        case = node_operand(case, index, lambda x: x.repeat(1, 1, 2, 1)[:, :, :3])
    with pytest.raises(ValueError, match="has 3 groups for 4 heads"):
        case.verify()

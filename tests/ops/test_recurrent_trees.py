"""Tree forms, folds and node states of the recurrent ops against the recurrence along every root-to-leaf path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.recurrent_trees import KDA, OPS, Dims, TreeCase, make_case
from tests.ops.tree_cases import LARGE_SHAPES, large_parents, path_to, path_to_ends, same_bits, small_parents

every_op = pytest.mark.parametrize("op", OPS, ids=repr)
every_large_shape = pytest.mark.parametrize("shape", LARGE_SHAPES)
LOW_PRECISION = [torch.float32, torch.bfloat16]


@st.composite
def cases(draw: st.DrawFn, op) -> TreeCase:
    parents = draw(small_parents())
    return make_case(
        op,
        parents,
        dims=Dims(*(draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 3], [1, 4, 8], [1, 5]))),
        decay=draw(st.sampled_from([0.0, 0.1, 5.0, 200.0, 1e4])),
        is_padding=draw(st.lists(st.booleans(), max_size=len(parents))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def ends_of(draw: st.DrawFn, case: TreeCase) -> list[int | None]:
    num_rows, num_nodes = case.tree.parents_BT.shape
    return draw(st.lists(st.none() | st.integers(0, num_nodes - 1), min_size=num_rows, max_size=num_rows))


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """NaN counts as infinitely wrong."""
    return (actual.double() - expected).abs().nan_to_num(nan=math.inf).max().item() if expected.numel() else 0.0


def folded(case: TreeCase, u: Tensor | None, ends: list[int | None]) -> Tensor:
    """States `[B, ...]` after a fold of the paths to `ends`, each in a slot of its own behind the pool."""
    destinations_B = len(case.pool) + torch.arange(len(ends))
    room = case.pool.new_full((len(ends), *case.pool.shape[1:]), math.nan)
    case = replace(case, pool=torch.cat([case.pool, room]))
    case.fold(u, destinations_B, path_to_ends(case.parents, ends))
    return case.pool[destinations_B]


def check_exact(case: TreeCase) -> None:
    """float64: every form is the recurrence to 1e-14 of the magnitude."""
    before = case.pool.clone()
    y_BT, states_BT = case.expected()
    tolerance = 1e-14 * case.op.magnitude(case, y_BT, states_BT)
    tree_y_BT, u_BT = case.verify()
    walked_y_BT, walked_states_BT = case.walk(torch.float64)
    assert same_bits(case.pool, before)
    assert largest_error(tree_y_BT, y_BT) <= tolerance
    assert largest_error(walked_y_BT, y_BT) <= tolerance
    assert largest_error(walked_states_BT, states_BT) <= tolerance
    for node in range(case.tree.parents_BT.shape[1]):
        states_B = folded(case, u_BT, [node] * len(case.parents))
        assert largest_error(states_B, states_BT[:, node]) <= tolerance


def check_budget(case: TreeCase, tokens: torch.dtype) -> None:
    """States in float32: each form errs at most twice what the recurrence errs in the same dtypes, plus a floor.

    The floor is for cases in which the recurrence is right by luck. An inner product of n terms of total magnitude m,
    rounded with unit roundoff r, is typically wrong by sqrt(n) r m. A result of the tree forms passes through four in
    a row: K terms to read the state, T in the solve or the sums of decays, T of the scores that weigh u or x (or of the
    fold), K inside the scores. The output is then rounded once more, to its own dtype.
    """
    case = case.to(tokens, torch.float32)
    y_BT, states_BT = case.to(torch.float64, torch.float64).expected()
    plain_y_BT, plain_states_BT = case.expected()
    scale = case.op.magnitude(case.to(torch.float64, torch.float64), y_BT, states_BT)
    num_nodes, key_dim = y_BT.shape[1], states_BT.shape[-1]
    floor = 2 * (math.sqrt(key_dim) + math.sqrt(num_nodes)) * torch.finfo(torch.float32).eps / 2 * scale
    y_budget = 2 * largest_error(plain_y_BT, y_BT) + floor + torch.finfo(tokens).eps / 2 * y_BT.abs().max().item()
    states_budget = 2 * largest_error(plain_states_BT, states_BT) + floor
    tree_y_BT, u_BT = case.verify()
    walked_y_BT, walked_states_BT = case.walk(torch.float32)
    assert tree_y_BT.dtype == walked_y_BT.dtype == tokens
    assert u_BT is None or u_BT.dtype == torch.float32
    assert largest_error(tree_y_BT, y_BT) <= y_budget
    assert largest_error(walked_y_BT, y_BT) <= y_budget
    assert largest_error(walked_states_BT, states_BT) <= states_budget
    for node in range(num_nodes):
        assert largest_error(folded(case, u_BT, [node] * len(y_BT)), states_BT[:, node]) <= states_budget


@every_op
@given(data=st.data())
def test_every_form_is_the_recurrence_on_small_trees(op, data: st.DataObject):
    check_exact(data.draw(cases(op)))


@every_op
@every_large_shape
@pytest.mark.parametrize("decay", [0.1, 5.0])
def test_every_form_is_the_recurrence_on_large_trees(op, shape: str, decay: float):
    check_exact(make_case(op, large_parents(shape), decay=decay))


@every_op
@given(data=st.data())
def test_every_form_keeps_the_error_budget_on_small_trees(op, data: st.DataObject):
    check_budget(data.draw(cases(op)), data.draw(st.sampled_from(LOW_PRECISION)))


@every_op
@every_large_shape
@pytest.mark.parametrize("tokens", LOW_PRECISION)
def test_every_form_keeps_the_error_budget_on_large_trees(op, shape: str, tokens: torch.dtype):
    check_budget(make_case(op, large_parents(shape), decay=0.1), tokens)


@every_op
@every_large_shape
def test_strong_decays_stay_in_range(op, shape: str):
    """-300 and -6.4e5 over a chain of 64: a factor e^(+sum) would overflow."""
    for decay in (300 / 64, 1e4):
        case = make_case(op, large_parents(shape), decay=torch.full((2, 64, 4, 8), decay, dtype=torch.float64))
        check_exact(case)
        check_budget(case, torch.float32)


@every_op
def test_what_is_left_behind_a_strong_decay_is_right_in_itself(op):
    """With nothing added, a chain's outputs are what e^-300 leaves of the state: each right to 12 of its digits."""
    case = make_case(op, large_parents("chain"), decay=torch.full((2, 64, 4, 8), 300 / 64, dtype=torch.float64))
    case.nodes[op.added].zero_()
    y_BT, states_BT = case.expected()
    tree_y_BT, u_BT = case.verify()
    for node in range(64):
        assert largest_error(tree_y_BT[:, node], y_BT[:, node]) <= 1e-12 * y_BT[:, node].abs().max().item()
    assert 0 < y_BT[:, 63].abs().max() < 1e-128
    states_B = folded(case, u_BT, [63, 63])
    assert largest_error(states_B, states_BT[:, 63]) <= 1e-12 * states_BT[:, 63].abs().max().item()


@every_op
@every_large_shape
def test_a_strong_decay_does_not_blur_the_mild_ones_behind_it(op, shape: str):
    case = make_case(op, large_parents(shape), decay=0.1)
    strong = make_case(op, large_parents(shape), decay=torch.full((2, 64, 4, 8), 1e4, dtype=torch.float64))
    mild_BT, strong_BT = (each.nodes[op.decays] for each in (case, strong))
    mild_BT[:, [1, 20]] = strong_BT[:, [1, 20]]
    check_budget(case, torch.float32)


@every_op
@given(data=st.data())
def test_a_fold_writes_destinations_and_nothing_else(op, data: st.DataObject):
    """Destinations are the rows' own slots, other slots or none; rows may have no accepted nodes; NaN is elsewhere."""
    case = data.draw(cases(op))
    ends = data.draw(ends_of(case))
    num_rows = len(ends)
    _, states_BT = case.expected()
    _, u_BT = case.verify()
    path = path_to_ends(case.parents, ends)
    for row, end in enumerate(ends):
        kept = [] if end is None else path_to(case.parents[row], end)
        rejected = [node for node in range(len(case.parents[row])) if node not in kept]
        for record in (*case.nodes, *([] if u_BT is None else [u_BT])):
            record[row, rejected] = math.nan
    free = [slot for slot in range(1, len(case.pool)) if slot not in case.slots_B.tolist()]
    others_B = torch.tensor(free[:num_rows])
    choice_B = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    destinations_B = torch.where(choice_B == 0, case.slots_B, torch.where(choice_B == 1, others_B, 0))
    before = case.pool.clone()
    case.fold(u_BT, destinations_B, path)
    tolerance = 1e-14 * states_BT.abs().max().item() * math.sqrt(states_BT.shape[1] * states_BT.shape[-1])
    written = set()
    for row, (end, destination) in enumerate(zip(ends, destinations_B.tolist(), strict=True)):
        if end is not None and destination != 0:
            assert largest_error(case.pool[destination], states_BT[row, end]) <= tolerance
            written.add(destination)
    unwritten = [slot for slot in range(len(case.pool)) if slot not in written]
    assert same_bits(case.pool[unwritten], before[unwritten])


@every_op
@given(data=st.data())
def test_a_fault_of_a_node_reaches_its_descendants_only(op, data: st.DataObject):
    case = data.draw(cases(op))
    row = data.draw(st.integers(0, len(case.parents) - 1))
    node = data.draw(st.integers(0, len(case.parents[0]) - 1))
    index = data.draw(st.integers(0, len(case.nodes) - 1))
    fault = data.draw(st.sampled_from([math.nan, math.inf]))
    clean = (*case.verify(), *case.walk(torch.float64))
    case.nodes[index][row, node].fill_(fault)
    faulty_y_BT, faulty_u_BT, *faulty_walk = case.verify() + case.walk(torch.float64)
    reached_BT = torch.zeros_like(case.tree.parents_BT, dtype=torch.bool)
    reached_BT[row] = case.tree.ancestors_BTT[row, :, node]
    for result, clean_result in zip((faulty_y_BT, faulty_u_BT, *faulty_walk), clean, strict=True):
        if result is not None and clean_result is not None:
            assert same_bits(result[~reached_BT], clean_result[~reached_BT])
    if index == op.read_by_the_node_alone:
        reached_BT[row] = torch.arange(reached_BT.shape[1]) == node
    assert not faulty_y_BT[reached_BT].isfinite().any()


@every_op
def test_a_thousand_rounds_drift_no_more_than_steps_do(op):
    """Each verifies a tree of 7 and folds a path of it, in float32; against one recurrence over all tokens."""
    parents, generator = [[0, 0, 0, 1, 1, 3, 4]], torch.Generator().manual_seed(1)
    case = make_case(op, parents, decay=0.3).to(torch.float32, torch.float32)
    start = case.pool[case.slots_B].clone()
    tokens = []
    for round_number in range(1000):
        nodes = make_case(op, parents, decay=0.3, seed=round_number).to(torch.float32, torch.float32).nodes
        case = replace(case, nodes=nodes)
        end = int(torch.randint(7, (), generator=generator))
        _, u_BT = case.verify()
        case.fold(u_BT, case.slots_B, path_to_ends(parents, [end]))
        tokens.append([x[0, path_to(parents[0], end)] for x in nodes])
    flat = [torch.cat(parts)[None] for parts in zip(*tokens, strict=True)]
    chain = [[0, *range(flat[0].shape[1] - 1)]]
    steps = replace(case, parents=chain, nodes=tuple(flat), pool=start.repeat(2, 1, 1, 1), slots_B=torch.tensor([1]))
    truth = steps.to(torch.float64, torch.float64).expected()[1][:, -1]
    assert largest_error(case.pool[case.slots_B], truth) <= 2 * largest_error(steps.expected()[1][:, -1], truth)


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements that an operation's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_decays_per_channel_are_never_all_in_memory():
    dims = Dims(groups=2, copies=1, key=64, value=16)
    case = make_case(KDA, large_parents("random", num_rows=1, num_nodes=63), dims=dims)
    with LargestTensor() as largest:
        case.verify()
    assert largest.num_elements <= 2 * 63 * 63 * 64 / 4

"""Convolutions over draft trees in the kernels: the bits of the PyTorch form.

Shapes: B rows, T nodes of a tree, D channels, W taps; of a window, W counts W - 1 inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops import conv_tree as plain
from hybrid_runtime.ops.cpu_kernels import tree_twins
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree
from tests.ops.cpu_kernels.budget import poisoned
from tests.ops.tree_cases import LARGE_SHAPES, build_tree, large_parents, path_to_ends, same_bits

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PADDING_ROW = 1


@dataclass(frozen=True)
class Case:
    x_BTD: Tensor
    weight_DW: Tensor
    bias_D: Tensor | None
    window_pool: Tensor  # NaN in slots of no row
    slots_B: Tensor
    tree: DraftTree
    path: AcceptedPath

    def fold(self, form, destinations_B: Tensor) -> Tensor:
        pool = self.window_pool.clone()
        form(pool, self.slots_B, destinations_B, self.x_BTD, self.path)
        return pool


def make_case(shape: str, num_nodes: int, dtype: torch.dtype, num_taps: int = 4, channels: int = 150) -> Case:
    generator = torch.Generator().manual_seed(num_nodes)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    parents = large_parents(shape, 3, num_nodes)
    slots_B = torch.tensor([5, 0, 2])
    pool = torch.full((7, num_taps - 1, channels), math.nan, dtype=dtype)
    pool[slots_B] = randn(3, num_taps - 1, channels)
    path = path_to_ends(parents, [num_nodes - 1, num_nodes // 2, 0])
    bias_D = randn(channels) if num_nodes % 2 else None
    return Case(
        randn(3, num_nodes, channels), randn(channels, num_taps), bias_D, pool, slots_B, build_tree(parents), path
    )


def outputs(form, case: Case) -> Tensor:
    return form(case.x_BTD, case.weight_DW, case.bias_D, case.window_pool, case.slots_B, case.tree)


def without_padding(x_BTD: Tensor) -> Tensor:
    return torch.cat([x_BTD[:PADDING_ROW], x_BTD[PADDING_ROW + 1 :]])


@pytest.mark.parametrize("shape", LARGE_SHAPES)
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 63, 64])
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_outputs_and_windows_have_the_bits_of_the_pytorch_form(shape: str, num_nodes: int, dtype: torch.dtype) -> None:
    case = make_case(shape, num_nodes, dtype)
    before = case.window_pool.clone()
    y_BTD = outputs(tree_twins.conv_tree, case)
    assert same_bits(without_padding(y_BTD), without_padding(outputs(plain.conv_tree, case)))
    assert dtype == F64 or not y_BTD[PADDING_ROW].any()
    assert same_bits(case.window_pool, before)
    for destinations_B in (case.slots_B, torch.tensor([3, 1, 2]), torch.tensor([0, 0, 6])):
        assert same_bits(case.fold(tree_twins.conv_fold, destinations_B), case.fold(plain.conv_fold, destinations_B))


@pytest.mark.parametrize("num_taps", [1, 2, 3, 7])
def test_any_number_of_taps(num_taps: int) -> None:
    case = make_case("random", 9, BF16, num_taps, channels=5)
    y_BTD, plain_y_BTD = outputs(tree_twins.conv_tree, case), outputs(plain.conv_tree, case)
    assert same_bits(without_padding(y_BTD), without_padding(plain_y_BTD))
    assert same_bits(case.fold(tree_twins.conv_fold, case.slots_B), case.fold(plain.conv_fold, case.slots_B))


def test_rejected_nodes_and_rows_that_commit_nothing_are_not_read() -> None:
    case = make_case("random", 12, F32)
    expected = case.fold(tree_twins.conv_fold, case.slots_B)
    nodes_BT, num_nodes_B = case.path
    for row in range(3):
        rejected = [node for node in range(12) if node not in nodes_BT[row, : num_nodes_B[row]]]
        case.x_BTD[row, rejected] = math.nan
    assert same_bits(case.fold(tree_twins.conv_fold, case.slots_B), expected)
    idle = replace(case, path=AcceptedPath(nodes_BT, torch.tensor([0, 1, 0])))
    assert same_bits(idle.fold(tree_twins.conv_fold, torch.tensor([2, 0, 5])), case.window_pool)


def test_a_fault_of_a_node_reaches_its_descendants_only() -> None:
    case = make_case("random", 12, F32)
    clean = outputs(tree_twins.conv_tree, case)
    case.x_BTD[0, 3] = math.nan
    faulty = outputs(tree_twins.conv_tree, case)
    reached_BT = torch.zeros(3, 12, dtype=torch.bool)
    reached_BT[0] = case.tree.ancestors_BTT[0, :, 3] & (case.tree.depths_BT[0] < case.tree.depths_BT[0, 3] + 4)
    assert same_bits(faulty[~reached_BT], clean[~reached_BT])
    assert faulty[reached_BT].isnan().all()


@pytest.mark.parametrize("num_taps", [1, 3, 4])
def test_a_sum_of_negative_zeros_is_negative(num_taps: int) -> None:
    case = make_case("random", 4, F32, num_taps, channels=20)
    case = replace(case, x_BTD=torch.zeros_like(case.x_BTD), weight_DW=-case.weight_DW.abs(), bias_D=None)
    case.window_pool[case.slots_B] = 0.0
    y_BTD, plain_y_BTD = outputs(tree_twins.conv_tree, case), outputs(plain.conv_tree, case)
    assert plain_y_BTD.signbit().all()
    assert same_bits(without_padding(y_BTD), without_padding(plain_y_BTD))


def spread(x: Tensor) -> Tensor:
    """The same integers, each axis strided, with some that are no node, slot or count in between."""
    wide = x.new_full([2 * size + 1 for size in x.shape], -1)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def test_strides_of_slots_trees_and_paths_do_not_matter() -> None:
    case = make_case("random", 7, F32, channels=20)
    y_BTD, windows = outputs(tree_twins.conv_tree, case), case.fold(tree_twins.conv_fold, case.slots_B)
    neighbour = torch.full_like(case.window_pool, math.nan)
    strided = replace(
        case,
        window_pool=torch.stack([neighbour, case.window_pool], dim=1)[:, 1],
        slots_B=spread(case.slots_B),
        tree=case.tree._replace(parents_BT=spread(case.tree.parents_BT)),
        path=AcceptedPath(*map(spread, case.path)),
    )
    assert same_bits(outputs(tree_twins.conv_tree, strided), y_BTD)
    both = torch.stack([neighbour, case.window_pool], dim=1)
    tree_twins.conv_fold(both[:, 1], strided.slots_B, strided.slots_B, strided.x_BTD, strided.path)
    assert same_bits(both[:, 1], windows)
    assert both[:, 0].isnan().all()


def test_strides_and_threads_do_not_matter(use_threads) -> None:
    case = make_case("random", 7, BF16, channels=300)
    y_BTD, windows = outputs(tree_twins.conv_tree, case), case.fold(tree_twins.conv_fold, case.slots_B)
    assert case.bias_D is not None
    weight_DW, bias_D = poisoned(case.weight_DW), poisoned(case.bias_D)
    neighbour = torch.full_like(case.x_BTD, math.nan)
    wide = torch.cat([case.x_BTD, neighbour], dim=2)[..., :300]
    tall = torch.cat([case.x_BTD, neighbour], dim=1)[:, :7]
    for x_BTD in (wide, tall, poisoned(case.x_BTD)):
        use_threads(2)
        strided = replace(case, x_BTD=x_BTD, weight_DW=weight_DW, bias_D=bias_D)
        assert same_bits(outputs(tree_twins.conv_tree, strided), y_BTD)
        assert same_bits(strided.fold(tree_twins.conv_fold, case.slots_B), windows)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda case: replace(case, weight_DW=case.weight_DW[:-1]), "must have size"),
        (lambda case: replace(case, window_pool=case.window_pool[:, :-1]), "window_pool must have size 3 on axis 1"),
        (lambda case: replace(case, slots_B=case.slots_B + 7), "which is no slot of a pool of 7"),
        (lambda case: replace(case, window_pool=case.window_pool.mT.contiguous().mT), "must be contiguous behind"),
        (lambda case: replace(case, x_BTD=case.x_BTD[:, :-1]), "must have size"),
        (lambda case: make_case("random", 5, F32, num_taps=65), "has 65 taps, more than 64"),
        (
            lambda case: replace(case, tree=case.tree._replace(parents_BT=case.tree.parents_BT + 1)),
            "which is no node before it",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        outputs(tree_twins.conv_tree, change(make_case("random", 5, F32)))


@pytest.mark.parametrize(
    ("nodes", "count", "complaint"), [([0, 5, 0, 0, 0], 2, "is 5, which is no node"), ([0] * 5, 6, "is 6, not in 0..5")]
)
def test_a_path_that_is_not_of_the_tree_is_refused(nodes: list[int], count: int, complaint: str) -> None:
    case = make_case("random", 5, F32)
    path = AcceptedPath(torch.tensor([nodes] * 3), torch.full((3,), count))
    before = case.window_pool.clone()
    with pytest.raises(ValueError, match=complaint):
        tree_twins.conv_fold(case.window_pool, case.slots_B, case.slots_B, case.x_BTD, path)
    assert same_bits(case.window_pool, before)


def test_a_pool_whose_windows_are_not_contiguous_is_refused() -> None:
    case = make_case("random", 5, F32)
    pool = case.window_pool.mT.contiguous().mT
    with pytest.raises(ValueError, match="must be contiguous behind"):
        tree_twins.conv_fold(pool, case.slots_B, case.slots_B, case.x_BTD, case.path)
    assert same_bits(pool, case.window_pool)


@pytest.mark.parametrize("destinations", [[2, 1, 3], [3, 1, 3]])
def test_a_window_that_rows_would_share_is_refused(destinations: list[int]) -> None:
    case = make_case("random", 5, F32)
    before = case.window_pool.clone()
    with pytest.raises(ValueError, match="is written for row 0 and used by row 2"):
        tree_twins.conv_fold(case.window_pool, case.slots_B, torch.tensor(destinations), case.x_BTD, case.path)
    assert same_bits(case.window_pool, before)

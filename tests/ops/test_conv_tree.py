"""The convolution over trees: bits of the token-by-token form along every path, windows of the recorded inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops.conv import conv_recurrent
from hybrid_runtime.ops.conv_tree import conv_fold, conv_tree
from hybrid_runtime.ops.draft_tree import DraftTree
from tests.ops.tree_cases import (
    LARGE_SHAPES,
    Parents,
    PathBatch,
    build_tree,
    large_parents,
    path_to,
    path_to_ends,
    same_bits,
    small_parents,
)


@dataclass(frozen=True)
class ConvCase:
    parents: Sequence[Parents]
    tree: DraftTree
    x_BTD: Tensor
    weight_DW: Tensor
    bias_D: Tensor | None
    pool: Tensor  # NaN in slots of no row
    slots_B: Tensor

    def verify(self) -> Tensor:
        return conv_tree(self.x_BTD, self.weight_DW, self.bias_D, self.pool, self.slots_B, self.tree)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs and windows of all nodes."""
        paths = PathBatch.of(self.parents)
        windows_SWD = self.pool[self.slots_B][paths.rows_S]
        y_LD, windows_LWD = conv_recurrent(
            paths.tokens(self.x_BTD), self.weight_DW, self.bias_D, windows_SWD, paths.layout
        )
        return y_LD[paths.tokens_BT], windows_LWD[paths.tokens_BT]


def make_case(
    parents: Sequence[Parents], *, taps: int = 4, bias: bool = True, dtype: torch.dtype, num_padding: int = 0, seed=0
) -> ConvCase:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_rows = len(parents)
    slots_B = torch.randperm(2 * num_rows, generator=generator)[:num_rows] + 1
    slots_B[:num_padding] = 0
    pool = torch.full((2 * num_rows + 1, taps - 1, 5), math.nan, dtype=dtype)
    pool[0] = 0.25
    pool[slots_B[num_padding:]] = randn(len(slots_B[num_padding:]), taps - 1, 5)
    x_BTD = randn(num_rows, len(parents[0]), 5)
    return ConvCase(parents, build_tree(parents), x_BTD, randn(5, taps), randn(5) if bias else None, pool, slots_B)


@st.composite
def cases(draw: st.DrawFn) -> ConvCase:
    parents = draw(small_parents())
    return make_case(
        parents,
        taps=draw(st.integers(1, 5)),
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
        num_padding=draw(st.integers(0, len(parents))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


large_cases = st.sampled_from(LARGE_SHAPES).map(lambda shape: make_case(large_parents(shape), dtype=torch.bfloat16))


@given(cases() | large_cases)
def test_outputs_are_the_definition_bit_for_bit(case: ConvCase):
    before = case.pool.clone()
    y_BTD, _ = case.expected()
    assert same_bits(case.verify(), y_BTD)
    assert same_bits(case.pool, before)


@given(cases() | large_cases, st.data())
def test_a_fold_leaves_the_recorded_inputs_of_the_path(case: ConvCase, data: st.DataObject):
    num_rows, num_nodes = case.tree.parents_BT.shape
    ends = data.draw(st.lists(st.none() | st.integers(0, num_nodes - 1), min_size=num_rows, max_size=num_rows))
    _, windows_BTWD = case.expected()
    for row, end in enumerate(ends):
        kept = [] if end is None else path_to(case.parents[row], end)
        case.x_BTD[row, [node for node in range(num_nodes) if node not in kept]] = math.nan
    free = [slot for slot in range(1, len(case.pool)) if slot not in case.slots_B.tolist()]
    choice_B = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    others_B = torch.where(choice_B == 1, torch.tensor(free[:num_rows]), 0)
    destinations_B = torch.where(choice_B == 0, case.slots_B, others_B)
    expected = case.pool.clone()
    for row, (end, destination) in enumerate(zip(ends, destinations_B.tolist(), strict=True)):
        if end is not None and destination != 0:
            expected[destination] = windows_BTWD[row, end]
    conv_fold(case.pool, case.slots_B, destinations_B, case.x_BTD, path_to_ends(case.parents, ends))
    assert same_bits(case.pool, expected)


@given(cases(), st.data())
def test_a_fault_of_a_node_reaches_its_descendants_only(case: ConvCase, data: st.DataObject):
    row = data.draw(st.integers(0, len(case.parents) - 1))
    node = data.draw(st.integers(0, len(case.parents[0]) - 1))
    clean_y_BTD = case.verify()
    case.x_BTD[row, node] = math.nan
    y_BTD = case.verify()
    reached_BT = torch.zeros_like(case.tree.parents_BT, dtype=torch.bool)
    reached_BT[row] = case.tree.ancestors_BTT[row, :, node]
    assert same_bits(y_BTD[~reached_BT], clean_y_BTD[~reached_BT])
    assert y_BTD[row, node].isnan().all()


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_a_fold_keeps_the_dtype_of_the_pool(pool_dtype: torch.dtype):
    pool = torch.zeros(2, 3, 5, dtype=pool_dtype)
    x_BTD = torch.randn(1, 2, 5, dtype=torch.bfloat16)
    conv_fold(pool, torch.tensor([1]), torch.tensor([1]), x_BTD, path_to_ends([[0, 0]], [1]))
    assert torch.equal(pool[1], torch.cat([torch.zeros(1, 5, dtype=pool_dtype), x_BTD[0].to(pool_dtype)]))


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_windows_of_another_dtype_are_rounded_as_steps_round_them(pool_dtype: torch.dtype):
    x_dtype = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[pool_dtype]
    case = make_case([[0, 0, 1, 2, 1]], dtype=x_dtype)
    case = replace(case, pool=torch.randn(case.pool.shape, generator=torch.Generator().manual_seed(0)).to(pool_dtype))
    y_BTD, windows_BTWD = case.expected()
    assert same_bits(case.verify(), y_BTD)
    for end in (0, 3):  # with inputs of the window before, and without
        pool = case.pool.clone()
        conv_fold(pool, case.slots_B, case.slots_B, case.x_BTD, path_to_ends(case.parents, [end]))
        assert same_bits(pool[case.slots_B], windows_BTWD[:, end].to(pool_dtype))

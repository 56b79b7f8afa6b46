"""Linear layers with packed weights against float64, and which inputs they take.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from hybrid_runtime.ops.cpu_kernels import huge_pages, pack, pack_all, packed_linear, packing_pays
from tests.ops.cpu_kernels.budget import EPS32, assert_within_budget

ROWS = (1, 2, 3, 7, 8, 9, 12, 13, 16, 17, 31, 32, 33, 64, 65, 130)
HALF_ULP_BF16 = torch.finfo(torch.bfloat16).eps / 2


def operands(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return x, weight, bias


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = functional.linear(x.double(), weight.double())
    magnitude = functional.linear(x.double().abs(), weight.double().abs())
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    y = packed_linear(x, pack(weight), weight.shape[0], bias)
    assert_within_budget(y, functional.linear(x, weight, bias), exact, magnitude)
    # Products of two bfloat16 are exact in float32; each of I sums and the bias errs at most one eps of the magnitude,
    # and the result is rounded once.
    sums_err = (x.shape[1] + 1) * EPS32 * magnitude
    assert ((y - exact).abs() <= sums_err + HALF_ULP_BF16 * (exact.abs() + sums_err)).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inputs", [1, 2, 3, 31, 33, 50, 300])
def test_every_number_of_rows_keeps_the_budget(rows: int, inputs: int) -> None:
    for outputs in (1, 7, 15, 17, 32, 50, 97):
        x, weight, bias = operands(rows, inputs, outputs)
        check(x, weight, bias)
        check(x, weight, None)


def test_the_size_of_a_model_keeps_the_budget() -> None:
    for rows in (1, 8, 100):
        check(*operands(rows, 1536, 768))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 5, 7), (3, 0, 7), (3, 5, 0)])
def test_empty_sizes(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = operands(rows, inputs, outputs)
    expected = bias.expand(rows, outputs) if inputs == 0 else x.new_empty(rows, outputs)
    assert torch.equal(packed_linear(x, pack(weight), outputs, bias), expected)


def test_packing_moves_every_weight_and_fills_with_zeros() -> None:
    _, weight, _ = operands(1, 33, 50)
    packed = pack(weight)
    assert packed.shape == (2, 17, 32, 2)
    assert packed.is_contiguous()
    assert torch.equal(pack(weight.mT.contiguous().mT), packed)
    for output in range(64):
        pairs = packed[output // 32, :, output % 32].flatten()
        assert torch.equal(pairs[:33], weight[output] if output < 50 else torch.zeros_like(pairs[:33]))
        assert pairs[33] == 0


def test_weights_packed_together_are_packed_as_each_alone() -> None:
    weights = [operands(1, inputs, outputs)[1] for inputs, outputs in ((33, 50), (0, 5), (64, 32), (3, 0), (768, 2000))]
    together = pack_all(weights)
    assert len({packed.untyped_storage().data_ptr() for packed in together}) == 1
    assert all(packed.data_ptr() % 64 == 0 for packed in together)
    for packed, weight in zip(together, weights, strict=True):
        assert torch.equal(packed, pack(weight))
    x = operands(3, 64, 1)[0]
    kept = together[2]
    del together
    assert torch.equal(packed_linear(x, kept, 32), packed_linear(x, pack(weights[2]), 32))
    assert pack_all([]) == []


@pytest.mark.parametrize("surplus", [-1, 0, 1, huge_pages.HUGE_PAGE_BYTES + 5])
def test_a_block_of_a_huge_page_or_more_starts_with_one(surplus: int) -> None:
    num_elements = huge_pages.HUGE_PAGE_BYTES // 4 + surplus
    block = huge_pages.empty(num_elements, torch.float32)
    assert block.shape == (num_elements,)
    assert block.dtype == torch.float32
    if surplus >= 0:
        assert block.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0
    assert block.fill_(3).sum() == 3 * num_elements


def test_any_leading_shape_and_any_strides_of_rows() -> None:
    x, weight, bias = operands(6, 51, 7)
    packed = pack(weight)
    expected = packed_linear(x, packed, 7, bias)
    assert torch.equal(packed_linear(x.view(2, 3, 51), packed, 7, bias), expected.view(2, 3, 7))
    assert torch.equal(packed_linear(x[0], packed, 7, bias), expected[0])
    wide = x.new_full((6, 70), torch.nan)
    wide[:, 10:61] = x
    assert torch.equal(packed_linear(wide[:, 10:61], packed, 7, bias), expected)
    assert torch.equal(packed_linear(wide.view(2, 3, 70)[..., 10:61], packed, 7, bias), expected.view(2, 3, 7))
    assert torch.equal(packed_linear(x[:1].expand(6, -1), packed, 7, bias), expected[:1].expand(6, -1))
    assert torch.equal(packed_linear(x, packed, 7, bias.repeat_interleave(2)[::2]), expected)


def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(use_threads) -> None:
    """The products cancel, so that a result is what the float32 sums round: another order of sums is another result."""
    x, weight, _ = operands(130, 151, 1000)
    x, packed = torch.cat([x, x.flip(1)], dim=1), pack(torch.cat([weight, -weight.flip(1)], dim=1))
    use_threads(1)
    together = packed_linear(x, packed, 1000)
    assert (together != 0).double().mean() > 0.5
    use_threads(2)
    assert torch.equal(packed_linear(x, packed, 1000), together)
    for rows in ROWS:
        assert torch.equal(packed_linear(x[:rows], packed, 1000), together[:rows])
        assert torch.equal(packed_linear(x[-rows:], packed, 1000), together[-rows:])


@pytest.mark.parametrize("rows", [5, 40])
def test_a_nan_or_infinity_stays_in_its_row(rows: int) -> None:
    x, weight, _ = operands(rows, 41, 20)
    x[1, 3], x[3, 40] = torch.nan, torch.inf
    y = packed_linear(x, pack(weight), 20)
    assert y[1].isnan().all()
    assert y[3].isinf().all()
    y[[1, 3]] = 0
    assert y.isfinite().all()


def test_nan_and_infinite_weights_stay_in_their_output() -> None:
    x, weight, bias = operands(5, 41, 20)
    weight[2, 5], weight[19, 40], bias[7] = torch.nan, torch.inf, torch.nan
    y = packed_linear(x, pack(weight), 20, bias)
    assert y[:, [2, 7]].isnan().all()
    assert y[:, 19].isinf().all()
    y[:, [2, 7, 19]] = 0
    assert y.isfinite().all()


def test_one_graph_serves_every_number_of_rows() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed_linear, fullgraph=True, backend=counter)
    _, weight, bias = operands(1, 5, 7)
    for rows in (3, 64, 2, 300):
        x, _, _ = operands(rows, 5, 7)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x, pack(weight), 7, bias), packed_linear(x, pack(weight), 7, bias))
    assert counter.frame_count == 1
    op = torch.ops.hybrid_runtime_cpu.packed_linear.default
    torch.library.opcheck(op, (x, pack(weight), 7, bias), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x, w, b: (x[:, 2:], w, 20, b), "last axis of x has size 38, which does not fit the 20 pairs of packed"),
        (lambda x, w, b: (x.float(), w, 20, b), "x must be of dtype bfloat16"),
        (lambda x, w, b: (x.sum(), w, 20, b), "x must have an axis"),
        (lambda x, w, b: (x.mT.contiguous().mT, w, 20, b), "x must be contiguous on its last axis"),
        (lambda x, w, b: (x, w.float(), 20, b), "packed must be of dtype bfloat16"),
        (lambda x, w, b: (x, w[0], 20, b), "packed must have 4 axes, not 3"),
        (lambda x, w, b: (x, w[:, :, ::2], 20, b), "packed must have size 32 on axis 2, not 16"),
        (lambda x, w, b: (x, w.mT.contiguous().mT, 20, b), "packed must be contiguous"),
        (lambda x, w, b: (x, w, 33, b), "packed has 1 panels, which does not fit 33 outputs"),
        (lambda x, w, b: (x, w, 0, b), "packed has 1 panels, which does not fit 0 outputs"),
        (lambda x, w, b: (x, w, -1, b), "packed has 1 panels, which does not fit -1 outputs"),
        (lambda x, w, b: (x, w, 20, b.float()), "bias_O must be of dtype bfloat16"),
        (lambda x, w, b: (x, w, 20, b[1:]), "bias_O must have size 20 on axis 0, not 19"),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint: str) -> None:
    x, weight, bias = operands(5, 40, 20)
    with pytest.raises(ValueError, match=complaint):
        packed_linear(*change(x, pack(weight), bias))


@pytest.mark.parametrize("weight", [torch.ones(4, 4), torch.ones(4).bfloat16(), torch.ones(4, 4, device="meta")])
def test_only_bfloat16_matrices_are_packed(weight: Tensor) -> None:
    assert not packing_pays(weight)
    with pytest.raises(ValueError, match="only a bfloat16 matrix on the CPU can be packed"):
        pack(weight)


def test_packing_pays_where_the_processor_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(4, 4).bfloat16()
    assert packing_pays(weight) is torch.cpu.get_capabilities().get("avx512_bf16", False)
    for capable in (True, False):
        monkeypatch.setattr("hybrid_runtime.ops.cpu_kernels.packed.MULTIPLIES_BFLOAT16", capable)
        assert packing_pays(weight) is capable

"""Mamba-2 over ragged sequences against the recurrence.

Shapes: L flat tokens, S sequences, R requested states, H heads, G groups, P head dim, N state dim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops.cpu_kernels import mamba2_chunked
from hybrid_runtime.ops.mamba2 import mamba2_recurrent
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.cpu_kernels.budget import EPS32, poisoned
from tests.ops.test_mamba2 import Case, cases, relative_errors, rms

LENGTHS = [1, 2, 3, 4, 5, 21]
POSITIONS = [[1], [], [2, 3], [4, 4], [1, 2, 3, 4, 5], [6, 16]]
UNIT_ROUNDOFF_BF16 = 2**-8


def wide_case(groups: int, heads: int, head_dim: int, state_dim: int, dtype: torch.dtype) -> Case:
    """Sequences of every length around a block's, states asked for inside and between blocks, NaN behind the last."""
    return case_of_lengths(LENGTHS, POSITIONS, groups, heads, head_dim, state_dim, dtype)


def case_of_lengths(
    lengths: list[int],
    positions: list[list[int]],
    groups: int,
    heads: int,
    head_dim: int,
    state_dim: int,
    dtype: torch.dtype,
) -> Case:
    layout = RaggedLayout.build(lengths, positions, num_tokens=sum(lengths) + 3)
    generator = torch.Generator().manual_seed(head_dim)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens = layout.num_tokens
    case = Case(
        layout,
        randn(num_tokens, heads, head_dim).to(dtype),
        randn(num_tokens, heads).exp().to(dtype),
        -randn(heads).exp(),
        randn(num_tokens, groups, state_dim).to(dtype),
        randn(num_tokens, groups, state_dim).to(dtype),
        randn(len(lengths), heads, head_dim, state_dim),
    )
    for tensor_L in (case.x_LHP, case.dt_LH, case.b_LGN, case.c_LGN):
        tensor_L[sum(lengths) :] = torch.nan
    return case


def check(case: Case) -> None:
    """At most twice the recurrence's error, plus 4 eps: decays and weights are products of up to four factors.

    In bfloat16 one factor of each term of a state is rounded; of a term of y up to two are, and y is.
    """
    y_LHP, states_RHPN = mamba2_chunked(*case.operands(), case.layout)
    plain = mamba2_recurrent(*case.operands(), case.layout)
    assert (y_LHP.dtype, states_RHPN.dtype) == (plain[0].dtype, plain[1].dtype)
    assert not y_LHP[sum(case.layout.lengths) :].any()
    num_tokens = sum(case.layout.lengths)
    errors = relative_errors((y_LHP, states_RHPN), case)
    if case.x_LHP.dtype == torch.bfloat16:
        for error, num_roundings in zip(errors, (3, 1), strict=True):
            assert (error[:num_tokens] <= num_roundings * 1.01 * UNIT_ROUNDOFF_BF16).all()
        return
    for error, plain_error in zip(errors, relative_errors(plain, case), strict=True):
        assert rms(error[:num_tokens]) <= 2 * rms(plain_error[:num_tokens]) + 4 * EPS32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_ragged_sequences_keep_the_budget(dtype: torch.dtype, data: st.DataObject) -> None:
    check(data.draw(cases(dtype, max_decay=1000.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("groups", "heads", "head_dim", "state_dim"), [(1, 1, 1, 1), (2, 6, 20, 12), (3, 3, 33, 17), (1, 48, 32, 128)]
)
def test_every_shape_keeps_the_budget(
    groups: int, heads: int, head_dim: int, state_dim: int, dtype: torch.dtype
) -> None:
    check(wide_case(groups, heads, head_dim, state_dim, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_fill_the_cache_several_times(dtype: torch.dtype) -> None:
    check(wide_case(1, 20, 64, 256, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_around_a_chunks(dtype: torch.dtype) -> None:
    positions = [[31], [32], [1, 32, 33], [7, 40, 64], [33, 65, 66, 97]]
    check(case_of_lengths([31, 32, 33, 64, 97], positions, 2, 4, 33, 20, dtype))


def test_small_integers_without_decay_are_exact_in_bfloat16() -> None:
    """Every factor and every sum has at most eight bits, so that nothing is rounded."""
    case = case_of_lengths([70, 32, 7], [[32, 50, 70], [], [7]], 1, 3, 40, 24, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for tensor, share in ((case.x_LHP, 0.2), (case.b_LGN, 0.1), (case.c_LGN, 0.1), (case.h0_SHPN, 1.0)):
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        tensor.copy_(signs * (torch.rand(tensor.shape, generator=generator) < share))
    case.dt_LH.copy_(torch.randint(1, 3, case.dt_LH.shape, generator=generator))
    case.a_H.zero_()
    exact = mamba2_recurrent(*case.double().operands(), case.layout)
    assert all(result.abs().max() <= 256 for result in exact)
    for result, truth in zip(mamba2_chunked(*case.operands(), case.layout), exact, strict=True):
        assert torch.equal(result.double(), truth)


@pytest.mark.parametrize("narrow", ["x_LHP", "b_LGN", "c_LGN"])
def test_one_operand_in_bfloat16_rounds_no_factor(narrow: str) -> None:
    case = wide_case(2, 4, 20, 12, torch.float32)
    case = replace(case, **{narrow: getattr(case, narrow).bfloat16()})
    y_LHP, states_RHPN = mamba2_chunked(*case.operands(), case.layout)
    assert (y_LHP.dtype, states_RHPN.dtype) == (case.x_LHP.dtype, torch.float32)
    y_errors, state_errors = relative_errors((y_LHP, states_RHPN), case)
    sums = 32 * EPS32  # of up to 21 terms
    assert state_errors.max() < sums
    assert y_errors[: sum(LENGTHS)].max() < (UNIT_ROUNDOFF_BF16 + sums if narrow == "x_LHP" else sums)


def test_float64_is_the_plain_forms() -> None:
    case = wide_case(2, 4, 20, 12, torch.float32).double()
    for error in relative_errors(mamba2_chunked(*case.operands(), case.layout), case):
        assert (error[: sum(LENGTHS)] < 1e-12).all()


def test_a_strong_decay_costs_later_tokens_no_accuracy() -> None:
    case = wide_case(1, 2, 8, 16, torch.float32)
    case.dt_LH[17] = 2000.0 / -case.a_H
    for error in relative_errors(mamba2_chunked(*case.operands(), case.layout), case):
        assert error[: sum(LENGTHS)].max() < 32 * EPS32  # sums of up to 21 terms


def test_strides_do_not_matter() -> None:
    case = wide_case(2, 4, 20, 12, torch.bfloat16)
    strided = Case(case.layout, *(poisoned(tensor) for tensor in case.operands()))
    expected = mamba2_chunked(*case.operands(), case.layout)
    for tensor, other in zip(mamba2_chunked(*strided.operands(), case.layout), expected, strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(dtype: torch.dtype, use_threads) -> None:
    case = wide_case(1, 7, 32, 64, dtype)
    use_threads(1)
    expected = mamba2_chunked(*case.operands(), case.layout)
    use_threads(2)
    for tensor, other in zip(mamba2_chunked(*case.operands(), case.layout), expected, strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_stays_in_its_sequence(dtype: torch.dtype) -> None:
    case = wide_case(1, 3, 8, 13, dtype)  # not a multiple of anything: no padding may carry it on
    expected = mamba2_chunked(*case.operands(), case.layout)
    third = slice(sum(LENGTHS[:2]), sum(LENGTHS[:3]))
    for tensor_L in (case.x_LHP, case.dt_LH, case.b_LGN, case.c_LGN):
        tensor_L[third] = torch.nan
    case.h0_SHPN[2] = torch.nan
    y_LHP, states_RHPN = mamba2_chunked(*case.operands(), case.layout)
    assert y_LHP[third].isnan().all()
    others_L = case.layout.token_sequence_L != 2
    assert torch.equal(y_LHP[others_L], expected[0][others_L])
    others_R = case.layout.state_sequence_R != 2
    assert torch.equal(states_RHPN[others_R], expected[1][others_R])


def test_a_prefill_without_sequences_is_all_padding() -> None:
    case = wide_case(1, 2, 4, 6, torch.float32)
    layout = RaggedLayout.build([], num_tokens=case.layout.num_tokens)
    y_LHP, states_RHPN = mamba2_chunked(*replace(case, h0_SHPN=case.h0_SHPN[:0]).operands(), layout)
    assert not y_LHP.any()
    assert states_RHPN.shape == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("token_sequence_L", lambda x: x + 6),
        ("token_sequence_L", lambda x: x - 1),
        ("token_sequence_L", lambda x: x.flip(0)),
        ("token_offset_L", lambda x: x + 1),
        ("state_sequence_R", lambda x: x + 6),
        ("state_length_R", lambda x: x + 20),
        ("state_length_R", lambda x: x * 0),
    ],
)
def test_a_layout_that_points_outside_is_refused(field: str, change) -> None:
    case = wide_case(1, 2, 4, 6, torch.float32)
    broken = replace(case.layout, **{field: change(getattr(case.layout, field))})
    with pytest.raises(ValueError, match="can't"):
        mamba2_chunked(*case.operands(), broken)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x, dt, a, b, c, h0: (x[:, :1], dt, a, b, c, h0), "x_LHP must have size 2 on axis 1"),
        (lambda x, dt, a, b, c, h0: (x, dt[1:], a, b, c, h0), "dt_LH must have size"),
        (lambda x, dt, a, b, c, h0: (x, dt, a[1:], b, c, h0), "a_H must have size 2"),
        (lambda x, dt, a, b, c, h0: (x, dt, a, b[..., 1:], c, h0), "b_LGN must have size 6 on axis 2"),
        (lambda x, dt, a, b, c, h0: (x, dt, a, b, c[:, :0], h0), "c_LGN must have size 1 on axis 1"),
        (lambda x, dt, a, b, c, h0: (x, dt, a, b, c, h0[0]), "h0_SHPN must have 4 axes"),
        (lambda x, dt, a, b, c, h0: (x, dt, a, b.repeat(1, 3, 1), c.repeat(1, 3, 1), h0), "3 groups for 2 heads"),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint: str) -> None:
    case = wide_case(1, 2, 4, 6, torch.float32)
    x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN = change(*case.operands())
    with pytest.raises(ValueError, match=complaint):
        mamba2_chunked(x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN, case.layout)

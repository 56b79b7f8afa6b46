"""The Mamba-2 forms against the float64 recurrence, and the recurrence against transformers' scan.

Shapes: as in `ops/mamba2.py`; U slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops.mamba2 import mamba2_chunked, mamba2_recurrent, mamba2_step
from hybrid_runtime.ops.ragged import RaggedLayout

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Form = Callable[..., tuple[Tensor, Tensor]]
EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case:
    layout: RaggedLayout
    x_LHP: Tensor
    dt_LH: Tensor
    a_H: Tensor
    b_LGN: Tensor
    c_LGN: Tensor
    h0_SHPN: Tensor

    def operands(self) -> Operands:
        return self.x_LHP, self.dt_LH, self.a_H, self.b_LGN, self.c_LGN, self.h0_SHPN

    def double(self) -> Case:
        return Case(self.layout, *(tensor.double() for tensor in self.operands()))

    def absolute(self) -> Case:
        """The case whose results bound what this case's terms add up to in absolute value."""
        return replace(self, **{name: getattr(self, name).abs() for name in ("x_LHP", "b_LGN", "c_LGN", "h0_SHPN")})


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype, max_decay: float) -> Case:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    positions = [sorted(draw(st.sets(st.integers(1, length), max_size=3))) for length in lengths]
    layout = RaggedLayout.build(
        lengths,
        positions,
        num_tokens=sum(lengths) + draw(st.integers(0, 5)),
        chunk_size=draw(st.integers(4, 64)),
    )
    num_groups, heads_per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return make_case(layout, num_groups, num_groups * heads_per_group, dtype, max_decay, draw(st.integers(0, 2**32)))


def make_case(
    layout: RaggedLayout, num_groups: int, num_heads: int, dtype: torch.dtype, max_decay: float, seed: int
) -> Case:
    """Random operands of `dtype` (a and h0 float32 at least); a token's `-dt a` reaches from 1e-4 to `max_decay`."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, head_dim, state_dim = layout.num_tokens, 4, 6

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    spread = torch.log(torch.tensor(max_decay / 1e-4, dtype=torch.float64))
    decay_LH = 1e-4 * torch.exp(spread * torch.rand(num_tokens, num_heads, generator=generator, dtype=torch.float64))
    a_H = -torch.exp(normal(num_heads))
    wide = torch.promote_types(dtype, torch.float32)
    return Case(
        layout,
        normal(num_tokens, num_heads, head_dim).to(dtype),
        (decay_LH / -a_H).to(dtype),
        a_H.to(wide),
        normal(num_tokens, num_groups, state_dim).to(dtype),
        normal(num_tokens, num_groups, state_dim).to(dtype),
        normal(len(layout.lengths), num_heads, head_dim, state_dim).to(wide),
    )


def relative_errors(results: tuple[Tensor, Tensor], case: Case) -> list[Tensor]:
    """Errors of y and of the states, each element in units of the sum of its terms' absolute values."""
    exact = mamba2_recurrent(*case.double().operands(), case.layout)
    magnitude = mamba2_recurrent(*case.double().absolute().operands(), case.layout)
    # Terms below float32's smallest normal number are lost without any relative accuracy.
    tiny = 1e-30
    return [
        (result.double() - truth).abs() / (size + tiny)
        for result, truth, size in zip(results, exact, magnitude, strict=True)
    ]


def rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item() if error.numel() else 0.0


@given(cases(torch.float64, max_decay=20.0))
@settings(max_examples=80, deadline=None)
def test_chunked_is_the_recurrence_in_float64(case: Case) -> None:
    y_LHP, states_RHPN = mamba2_chunked(*case.operands(), case.layout)
    assert y_LHP.dtype == states_RHPN.dtype == torch.float64
    for error in relative_errors((y_LHP, states_RHPN), case):
        assert (error < 1e-12).all()
    assert not y_LHP[sum(case.layout.lengths) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_chunked_errs_at_most_twice_what_the_recurrence_errs(dtype: torch.dtype, data: st.DataObject) -> None:
    """The floor covers cases in which the recurrence hardly rounds (one token, say) and the chunked form does.

    To each term the chunked form adds the roundings of the decay's exponent, of the exponential, of its product with
    the score and of the sum of both parts of y, half an eps each. The first is half an eps of the exponent, but a term
    counts beside the others only as its exponential, and `z e^-z` is below 1/2: 4 eps are more than the sum of all.
    """
    case = data.draw(cases(dtype, max_decay=1000.0))
    chunked = mamba2_chunked(*case.operands(), case.layout)
    recurrent = mamba2_recurrent(*case.operands(), case.layout)
    assert chunked[0].dtype == dtype
    assert chunked[1].dtype == torch.float32
    errors = zip(relative_errors(chunked, case), relative_errors(recurrent, case), strict=True)
    for error, plain_error in errors:
        assert rms(error) <= 2 * rms(plain_error) + 4 * EPS32


def test_a_strong_decay_costs_later_tokens_no_accuracy() -> None:
    """One token forgets everything; a running sum kept in float32 would blur the decays behind it by 1e-4."""
    layout = RaggedLayout.build([64], chunk_size=64)
    case = make_case(layout, 1, 2, torch.float32, 0.01, seed=0)
    case.dt_LH[3] = 2000.0 / -case.a_H
    for error in relative_errors(mamba2_chunked(*case.operands(), layout), case):
        assert error.max() < 32 * EPS32  # sums of up to 64 terms


@pytest.mark.parametrize("form", [mamba2_recurrent, mamba2_chunked])
def test_padding_tokens_touch_nothing(form: Form) -> None:
    layout = RaggedLayout.build([5, 1], [[2, 5], [1]], num_tokens=9, chunk_size=4)
    case = make_case(layout, 2, 6, torch.float32, 1.0, seed=1)
    for tensor_L in (case.x_LHP, case.dt_LH, case.b_LGN, case.c_LGN):
        tensor_L[6:] = torch.nan
    y_LHP, states_RHPN = form(*case.operands(), layout)
    assert y_LHP.isfinite().all()
    assert not y_LHP[6:].any()
    assert states_RHPN.isfinite().all()


def test_a_prefill_without_sequences_is_all_padding() -> None:
    layout = RaggedLayout.build([], num_tokens=3)
    case = make_case(layout, 1, 2, torch.float32, 1.0, seed=2)
    for form in (mamba2_recurrent, mamba2_chunked):
        y_LHP, states_RHPN = form(*case.operands(), layout)
        assert y_LHP.shape == case.x_LHP.shape
        assert not y_LHP.any()
        assert states_RHPN.shape == (0, *case.h0_SHPN.shape[1:])


@given(cases(torch.float32, max_decay=5.0))
@settings(max_examples=25, deadline=None)
def test_sequences_do_not_see_each_other(case: Case) -> None:
    first = case.layout.lengths[0]
    y_LHP, states_RHPN = mamba2_chunked(*case.operands(), case.layout)
    for tensor_L in (case.x_LHP, case.b_LGN, case.c_LGN):
        tensor_L[first:] = torch.randn_like(tensor_L[first:])
    case.h0_SHPN[1:] = torch.randn_like(case.h0_SHPN[1:])
    other_y_LHP, other_states_RHPN = mamba2_chunked(*case.operands(), case.layout)
    assert torch.equal(y_LHP[:first], other_y_LHP[:first])
    own_R = case.layout.state_sequence_R == 0
    assert torch.equal(states_RHPN[own_R], other_states_RHPN[own_R])


@st.composite
def decodes(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Case, Tensor, Tensor]:
    """One token per row; a pool that is NaN in every slot of no row; the rows' slots, 0 for padding rows."""
    num_live, num_padding = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    num_groups, heads_per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_rows, seed = num_live + num_padding, draw(st.integers(0, 2**32))
    layout = RaggedLayout.build([1] * num_rows)
    case = make_case(layout, num_groups, num_groups * heads_per_group, dtype, 20.0, seed)
    generator = torch.Generator().manual_seed(seed)
    slots_B = torch.randperm(8, generator=generator)[:num_rows] + 1
    slots_B[torch.randperm(num_rows, generator=generator)[:num_padding]] = 0
    pool_UHPN = torch.full((9, *case.h0_SHPN.shape[1:]), torch.nan, dtype=case.h0_SHPN.dtype)
    pool_UHPN[slots_B] = case.h0_SHPN
    pool_UHPN[0] = 0
    return case, pool_UHPN, slots_B


@given(decodes(torch.float64))
@settings(max_examples=60, deadline=None)
def test_step_is_the_recurrence_in_float64(decode: tuple[Case, Tensor, Tensor]) -> None:
    case, pool_UHPN, slots_B = decode
    before_UHPN = pool_UHPN.clone()
    y_BHP = mamba2_step(*case.operands()[:5], pool_UHPN, slots_B)
    live_B = slots_B > 0
    y_error, state_error = relative_errors((y_BHP, pool_UHPN[slots_B]), case)
    assert (y_error[live_B] < 1e-12).all()
    assert (state_error[live_B] < 1e-12).all()
    assert y_BHP.isfinite().all()
    untouched_U = torch.ones(9, dtype=torch.bool).index_fill(0, slots_B[live_B], False)
    assert torch.equal(pool_UHPN[untouched_U].nan_to_num(), before_UHPN[untouched_U].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_step_errs_at_most_twice_what_the_recurrence_errs(dtype: torch.dtype, data: st.DataObject) -> None:
    """The step rounds what the recurrence rounds; the floor of 1 eps allows for another order of the sum over N."""
    case, pool_UHPN, slots_B = data.draw(decodes(dtype))
    y_BHP = mamba2_step(*case.operands()[:5], pool_UHPN, slots_B)
    assert y_BHP.dtype == dtype
    live_B = slots_B > 0
    step_errors = relative_errors((y_BHP, pool_UHPN[slots_B]), case)
    plain_errors = relative_errors(mamba2_recurrent(*case.operands(), case.layout), case)
    for error, plain_error in zip(step_errors, plain_errors, strict=True):
        assert rms(error[live_B]) <= 2 * rms(plain_error[live_B]) + EPS32


def test_steps_continue_a_prefill() -> None:
    """Prefill five tokens, step through the rest: the same as one pass."""
    case = make_case(RaggedLayout.build([12]), 1, 3, torch.float64, 3.0, seed=3)
    y_LHP, states_RHPN = mamba2_recurrent(*case.operands(), case.layout)
    x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN = case.operands()
    _, start_RHPN = mamba2_chunked(x_LHP[:5], dt_LH[:5], a_H, b_LGN[:5], c_LGN[:5], h0_SHPN, RaggedLayout.build([5]))
    pool_UHPN = torch.cat([torch.zeros_like(start_RHPN), start_RHPN])
    for t in range(5, 12):
        now = slice(t, t + 1)
        y_BHP = mamba2_step(x_LHP[now], dt_LH[now], a_H, b_LGN[now], c_LGN[now], pool_UHPN, torch.tensor([1]))
        torch.testing.assert_close(y_BHP, y_LHP[now], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pool_UHPN[1:], states_RHPN, rtol=1e-12, atol=1e-12)


def test_recurrence_is_transformers_scan() -> None:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

    case = make_case(RaggedLayout.build([23]), 2, 6, torch.float32, 2.0, seed=4)
    x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN = case.operands()
    y_SLHP, state_SHPN = modeling.mamba2_chunk_scan(
        x_LHP[None], dt_LH[None], a_H, b_LGN[None], c_LGN[None], 8, initial_states=h0_SHPN, return_final_states=True
    )
    y_LHP, states_RHPN = mamba2_recurrent(*case.operands(), case.layout)
    torch.testing.assert_close(y_LHP, y_SLHP[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states_RHPN, state_SHPN, rtol=1e-5, atol=1e-5)

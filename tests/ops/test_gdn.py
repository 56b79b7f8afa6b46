"""Gated DeltaNet: every form against the recurrent definition, and the definition against transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from hybrid_runtime.ops.gdn import gdn_chunked, gdn_recurrent, gdn_step
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.delta_cases import (
    DeltaCase,
    DeltaOp,
    cases,
    check_chunked_budget,
    check_exact,
    check_gradients,
    check_step_budget,
    check_step_exact,
    make_case,
)

GDN = DeltaOp(gdn_recurrent, gdn_chunked, gdn_step, decays_per_channel=False)
LOW_PRECISION = st.sampled_from([torch.float32, torch.bfloat16])


# With β up to 2 a token may turn the state around in place of moving it towards v. Errors then no longer shrink from
# token to token and the budget, which is for β as models have it, does not apply; the algebra does.
@given(cases(GDN) | cases(GDN, max_beta=2.0))
def test_chunked_is_the_recurrence(case: DeltaCase):
    check_exact(GDN, case)


@given(cases(GDN), LOW_PRECISION)
def test_chunked_stays_within_the_error_budget(case: DeltaCase, tokens: torch.dtype):
    check_chunked_budget(GDN, case, tokens)


@given(cases(GDN, max_length=12))
def test_step_is_the_recurrence(case: DeltaCase):
    check_step_exact(GDN, case)


@given(cases(GDN, max_length=12), LOW_PRECISION)
def test_step_stays_within_the_error_budget(case: DeltaCase, tokens: torch.dtype):
    check_step_budget(GDN, case, tokens)


@pytest.mark.parametrize("decay", [0.1, 1e4])
def test_gradients_of_the_chunked_form(decay: float):
    layout = RaggedLayout.build([3, 70, 20], [[1], [64, 70], []], chunk_size=24)
    check_gradients(GDN, make_case(layout, decay=decay, decays_per_channel=False))


@pytest.mark.parametrize("per_token", [-2.0, -1e4])
def test_uniform_strong_decays_stay_in_range(per_token: float):
    """Path sums over a chunk are -128 and -6.4e5: a factor e^(+sum) would overflow float32."""
    case = make_case(RaggedLayout.build([200]), decays_per_channel=False)
    case.log_a.fill_(per_token)
    check_exact(GDN, case)
    check_chunked_budget(GDN, case, torch.float32)


def test_a_strong_decay_does_not_blur_the_mild_ones_behind_it():
    case = make_case(RaggedLayout.build([64]), decay=0.1, correlation=0.0, decays_per_channel=False)
    case.log_a[[1, 20]] = -1e4
    check_chunked_budget(GDN, case, torch.float32)


def test_agrees_with_transformers():
    layout = RaggedLayout.build([70])
    case = make_case(layout, key_dim=8, value_dim=6, decays_per_channel=False).to(torch.float32, torch.float32)
    for function in (reference.torch_recurrent_gated_delta_rule, reference.torch_chunk_gated_delta_rule):
        # they normalise on demand, share key heads alike, and scale q by K^-1/2 on their own
        expected_y, expected_state = function(
            *(tensor[None] for tensor in case.tokens()), initial_state=case.s0.mT, output_final_state=True
        )
        q = case.q * 8**-0.5
        y_LHV, states_RHVK = gdn_chunked(q, case.k, case.v, case.log_a, case.beta, case.s0, layout)
        torch.testing.assert_close(y_LHV, expected_y[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states_RHVK, expected_state.mT, rtol=1e-5, atol=1e-5)

"""Kimi delta attention: every form against the recurrent definition, and the definition against transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize
from transformers.models.kimi_linear import modeling_kimi_linear as reference

from hybrid_runtime.ops.kda import kda_chunked, kda_recurrent, kda_step
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

KDA = DeltaOp(kda_recurrent, kda_chunked, kda_step, decays_per_channel=True)
LOW_PRECISION = st.sampled_from([torch.float32, torch.bfloat16])


# With β up to 2 a token may turn the state around in place of moving it towards v. Errors then no longer shrink from
# token to token and the budget, which is for β as models have it, does not apply; the algebra does.
@given(cases(KDA) | cases(KDA, max_beta=2.0))
def test_chunked_is_the_recurrence(case: DeltaCase):
    check_exact(KDA, case)


@given(cases(KDA), LOW_PRECISION)
def test_chunked_stays_within_the_error_budget(case: DeltaCase, tokens: torch.dtype):
    check_chunked_budget(KDA, case, tokens)


@given(cases(KDA, max_length=12))
def test_step_is_the_recurrence(case: DeltaCase):
    check_step_exact(KDA, case)


@given(cases(KDA, max_length=12), LOW_PRECISION)
def test_step_stays_within_the_error_budget(case: DeltaCase, tokens: torch.dtype):
    check_step_budget(KDA, case, tokens)


@pytest.mark.parametrize("decay", [0.1, 1e4])
def test_gradients_of_the_chunked_form(decay: float):
    layout = RaggedLayout.build([3, 70, 20], [[1], [64, 70], []], chunk_size=24)
    check_gradients(KDA, make_case(layout, decay=decay, decays_per_channel=True))


@pytest.mark.parametrize("per_token", [-2.0, -1e4])
def test_uniform_strong_decays_stay_in_range(per_token: float):
    """Path sums over a chunk are -128 and -6.4e5: a factor e^(+sum) would overflow float32."""
    case = make_case(RaggedLayout.build([200]), decays_per_channel=True)
    case.log_a.fill_(per_token)
    check_exact(KDA, case)
    check_chunked_budget(KDA, case, torch.float32)


def test_a_strong_decay_does_not_blur_the_mild_ones_behind_it():
    case = make_case(RaggedLayout.build([64]), decay=0.1, correlation=0.0, decays_per_channel=True)
    case.log_a[[1, 20]] = -1e4
    check_chunked_budget(KDA, case, torch.float32)


def test_agrees_with_transformers():
    layout = RaggedLayout.build([70])
    case = make_case(layout, copies=1, key_dim=8, value_dim=6, decays_per_channel=True).to(torch.float32, torch.float32)
    q_LGK = case.q * 3.0
    for function in (reference.recurrent_kimi_delta_attention, reference.chunk_kimi_delta_attention):
        expected_y, expected_state = function(
            *(tensor[None] for tensor in (q_LGK, case.k, case.v, case.log_a, case.beta)),
            initial_state=case.s0.mT,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        q = normalize(q_LGK, dim=-1) * 8**-0.5
        y_LHV, states_RHVK = kda_chunked(q, case.k, case.v, case.log_a, case.beta, case.s0, layout)
        # transformers normalises by sqrt(x·x + 1e-6): 5e-7 relative for a key of norm 1, three times per product
        torch.testing.assert_close(y_LHV, expected_y[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states_RHVK, expected_state.mT, rtol=1e-5, atol=1e-5)

"""Prefill logits against transformers: equal in float64, within the error budget in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_runtime.models.hybrid_model import HybridModel
from tests.parity.driver import Prompt
from tests.parity.runs import Run, run
from tests.parity.zoo import CASES, Case

cases = pytest.mark.parametrize("case", CASES, ids=str)


def prefill_texts(made: Run, model: HybridModel) -> list[Tensor]:
    """Logits of all texts of a run, prefilled together."""
    driver = made.driver(model)
    return driver.prefill(*(Prompt(driver.start(), text) for text in made.texts))


@cases
def test_float64_logits_equal_those_of_transformers(case: Case) -> None:
    """Holds only if neither side rounds to float32 anywhere, so it checks the reference as much as us."""
    made = run(case)
    logits = prefill_texts(made, made.ours_64)
    assert all(rows.dtype == torch.float64 for rows in [*logits, *made.reference_logits_64])
    assert made.max_error(logits) <= made.float64_bound


@cases
def test_float32_logits_err_at_most_twice_what_transformers_errs(case: Case) -> None:
    made = run(case)
    logits = prefill_texts(made, made.ours_32)
    assert all(rows.dtype == torch.float32 for rows in logits)
    largest = max(float(rows.abs().max()) for rows in made.reference_logits_64)
    one_rounding = torch.finfo(torch.float32).eps * largest  # no budget can be finer than the result's own grid
    assert made.max_error(logits) <= 2 * made.float32_error + one_rounding

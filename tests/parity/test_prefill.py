"""Prefill logits against transformers: equal in float64, within the error budget in float32 and bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from tests.parity.driver import Prompt
from tests.parity.reference import in_float64, logits_of
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


@cases
def test_bfloat16_logits_err_at_most_twice_what_transformers_errs(case: Case) -> None:
    """Root mean square over all logits: in bfloat16 a token near the border between two experts may fall to either."""
    made = run(case)
    model = copy.deepcopy(made.reference).bfloat16()
    text = made.texts[4]
    with in_float64(model) as wide:
        truth = logits_of(wide, text)
    driver = made.driver(adapt(model))
    request = driver.start()
    ours = torch.cat([*driver.prefill(Prompt(request, text[:-8])), *(driver.decode([request], [t]) for t in text[-8:])])
    assert ours.dtype == torch.float32

    def error(logits: Tensor) -> float:
        return float((logits.double() - truth).square().mean().sqrt())

    assert error(ours) <= 2 * error(logits_of(model, text))

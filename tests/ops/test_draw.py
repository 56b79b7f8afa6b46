"""The plain form of a draw: against the definitions of the options, token by token, and against the distribution.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hybrid_runtime.ops.draw import DrawInputs, draw_tokens
from tests.ops.draw_cases import OFF, RowOptions, check_exact_shares, check_rows, draws, inputs_of

F32, F64 = torch.float32, torch.float64
SIZES = (1, 2, 5, 23, 64)


@given(draws(SIZES))
def test_a_draw_is_what_the_definitions_give(case: tuple[Tensor, list[RowOptions]]) -> None:
    logits_BV, rows = case
    for dtype in (F64, F32):
        for all_filters in (False, True):
            ids_B = draw_tokens(logits_BV.to(dtype), inputs_of(rows, all_filters=all_filters))
            check_rows(ids_B, logits_BV.to(dtype), rows)


GREEDY_ROWS = [
    ([0.0, 2.0, 2.0, 1.0], 1),
    ([-math.inf, -math.inf], 0),
    ([-math.inf, -1.0], 1),
    ([3.0e38, math.inf, math.inf], 1),
    ([7.0], 0),
]


@pytest.mark.parametrize(("logits", "expected"), GREEDY_ROWS)
def test_a_greedy_row_takes_the_first_maximum(logits: list[float], expected: int) -> None:
    options = inputs_of([RowOptions(temperature=0, top_k=1, top_p=0.1, min_p=1.0, seed=seed) for seed in range(4)])
    assert draw_tokens(torch.tensor([logits] * 4), options).tolist() == [expected] * 4


def test_exact_shares() -> None:
    check_exact_shares(draw_tokens)


def test_no_rows() -> None:
    assert draw_tokens(torch.zeros(0, 5), inputs_of([], all_filters=True)).shape == (0,)


def test_a_compiled_draw_is_the_eager_one() -> None:
    rows = [RowOptions(seed=seed, top_k=9, top_p=0.8, min_p=0.01, temperature=seed % 3 / 2) for seed in range(12)]
    logits_BV = torch.randn(12, 90, generator=torch.Generator().manual_seed(0), dtype=F64)
    compiled = torch.compile(draw_tokens, fullgraph=True, backend="aot_eager")
    for options in (inputs_of(rows), inputs_of([replace(row, top_k=OFF, top_p=1.0, min_p=0.0) for row in rows])):
        assert torch.equal(compiled(logits_BV, options), draw_tokens(logits_BV, options))


Change = Callable[[Tensor, dict[str, Any]], tuple[Tensor, dict[str, Any]]]
MISFITS: dict[str, tuple[Change, str]] = {
    "logits of another dtype": (lambda x, o: (x.bfloat16(), o), "logits_BV must be of dtype float32 or float64"),
    "logits of one axis": (lambda x, o: (x[0], o), "logits_BV must"),
    "no tokens": (lambda x, o: (x[:, :0], o), "logits_BV must .*at least one token"),
    "strided tokens": (lambda x, o: (x[:, ::2], o), "logits_BV must be contiguous"),
    "a row too many": (lambda x, o: (x[1:], o), "temperature_B must"),
    "two axes": (lambda x, o: (x, {**o, "min_p_B": o["min_p_B"][:, None]}), "min_p_B must"),
    "too few seeds": (lambda x, o: (x, {**o, "seeds_B": o["seeds_B"][:1]}), "seeds_B must"),
    "a narrow share": (lambda x, o: (x, {**o, "top_p_B": o["top_p_B"].float()}), "top_p_B must be of dtype"),
    "a narrow count": (lambda x, o: (x, {**o, "top_k_B": o["top_k_B"].int()}), "top_k_B must be of dtype"),
    "a float position": (lambda x, o: (x, {**o, "positions_B": o["positions_B"].float()}), "positions_B must be of"),
    "another device": (lambda x, o: (x, {**o, "seeds_B": o["seeds_B"].to("meta")}), "seeds_B must be|meta"),
}


def misfit(name: str) -> tuple[Tensor, DrawInputs]:
    options = inputs_of([RowOptions(), RowOptions()], all_filters=True)
    logits_BV, changed = MISFITS[name][0](torch.zeros(2, 6), options._asdict())
    return logits_BV, DrawInputs(**changed)


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=MISFITS[name][1]):
        draw_tokens(*misfit(name))

"""What a twin may err: twice what the PyTorch form errs in the same dtypes, against float64."""

from __future__ import annotations

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def assert_within_budget(twin: Tensor, plain: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """`magnitude` is what the terms of each element add up to in absolute value.

    The floor of one eps of it allows for another order of the sum where the plain form rounds little by luck. A NaN
    fails.
    """
    assert twin.dtype == plain.dtype
    assert twin.shape == plain.shape
    eps = torch.finfo(torch.float64).eps if twin.dtype == torch.float64 else EPS32
    assert rms(twin - exact) <= 2 * rms(plain - exact) + eps * rms(magnitude)


def poisoned(x: Tensor) -> Tensor:
    """The same values, each axis strided, with NaN in between."""
    wide = x.new_full([2 * size + 1 for size in x.shape], torch.nan)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view

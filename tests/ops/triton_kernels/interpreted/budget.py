"""How far a kernel may be from float64, in terms of how far its PyTorch twin is."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_within_budget(fast: Tensor, plain: Tensor, exact: Tensor, magnitude: float) -> None:
    """`fast` errs at most twice what `plain` errs in the same dtype, plus one eps of state arithmetic of `magnitude`.

    The floor is for another order of the sums, of terms that add up to `magnitude` in absolute value. Results in 16
    bits are rounded once, as the twin's are. In float64, where all three are computed alike, the floor is all there
    is: some more roundings than one.
    """
    assert fast.dtype == plain.dtype
    assert fast.isfinite().all()
    eps = torch.finfo(torch.promote_types(fast.dtype, torch.float32)).eps
    if not fast.numel():
        return
    if fast.dtype == torch.float64:
        assert (fast - exact).abs().max() <= 32 * eps * magnitude
    else:
        assert rms(fast - exact) <= 2 * rms(plain - exact) + eps * magnitude


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()

"""Mamba-2 and delta-rule steps against the float64 recurrence.

Shapes: B rows, G groups or key heads, H heads, P head dim, N state dim, K key dim, V value dim, U slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from einops import einsum
from torch import Tensor
from torch.nn.functional import normalize

from hybrid_runtime.ops import cpu_kernels
from hybrid_runtime.ops.gdn import gdn_recurrent, gdn_step
from hybrid_runtime.ops.kda import kda_recurrent, kda_step
from hybrid_runtime.ops.mamba2 import mamba2_recurrent, mamba2_step
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
NUM_SLOTS = 12


@dataclass(frozen=True)
class Update:
    """An op in its three forms, and random float64 tokens for it."""

    twin: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    recurrent: Callable[..., tuple[Tensor, Tensor]]
    magnitude: Callable[
        ..., tuple[Tensor, Tensor]
    ]  # of (parts, states): what outputs and states add up in absolute value
    parts: tuple[Tensor, ...]  # [B, ...] each, but for Mamba-2's `a`
    state_shape: tuple[int, ...]

    def cast(self, parts: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(part.to(parts) for part in self.parts)


def mamba2_magnitude(parts: tuple[Tensor, ...], states_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c = parts
    return mamba2_recurrent(x.abs(), dt, a, b.abs(), c.abs(), states_BHPN.abs(), RaggedLayout.build([1] * len(x)))


def delta_magnitude(parts: tuple[Tensor, ...], states_BHVK: Tensor) -> tuple[Tensor, Tensor]:
    q_BGK, k_BGK, v_BHV, log_a_BHX, beta_BH = parts
    copies = v_BHV.shape[1] // q_BGK.shape[1]
    q_BHK, k_BHK = (x_BGK.abs().repeat_interleave(copies, dim=1) for x_BGK in (q_BGK, k_BGK))
    kept_BHVK = log_a_BHX.reshape(*beta_BH.shape, 1, -1).exp() * states_BHVK.abs()
    u_BHV = beta_BH[..., None] * (v_BHV.abs() + einsum(kept_BHVK, k_BHK, "b h v k, b h k -> b h v"))
    states_BHVK = kept_BHVK + u_BHV[..., None] * k_BHK[:, :, None]
    return einsum(states_BHVK, q_BHK, "b h v k, b h k -> b h v"), states_BHVK


def mamba2(rows: int, groups: int, heads: int, head_dim: int, state_dim: int) -> Update:
    generator = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    parts = (
        randn(rows, heads, head_dim),
        randn(rows, heads).exp(),
        -randn(heads).exp(),
        randn(rows, groups, state_dim),
        randn(rows, groups, state_dim),
    )
    shape = (heads, head_dim, state_dim)
    return Update(cpu_kernels.mamba2_step, mamba2_step, mamba2_recurrent, mamba2_magnitude, parts, shape)


def delta(rows: int, groups: int, heads: int, value_dim: int, key_dim: int, *, per_channel: bool) -> Update:
    generator = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    log_a = -randn(rows, heads, key_dim).exp() if per_channel else -randn(rows, heads).exp()
    parts = (
        normalize(randn(rows, groups, key_dim), dim=-1),
        normalize(randn(rows, groups, key_dim), dim=-1),
        randn(rows, heads, value_dim),
        log_a,
        randn(rows, heads).sigmoid(),
    )
    shape = (heads, value_dim, key_dim)
    if per_channel:
        return Update(cpu_kernels.kda_step, kda_step, kda_recurrent, delta_magnitude, parts, shape)
    return Update(cpu_kernels.gdn_step, gdn_step, gdn_recurrent, delta_magnitude, parts, shape)


def pool_and_slots(update: Update, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Slots of which every third is 0; a pool with NaN in every slot of no row."""
    generator = torch.Generator().manual_seed(rows)
    slots_B = torch.randperm(NUM_SLOTS, generator=generator)[:rows] + 1
    slots_B[1::3] = 0
    pool = torch.full((NUM_SLOTS + 1, *update.state_shape), torch.nan, dtype=F64)
    pool[slots_B] = torch.randn((rows, *update.state_shape), generator=generator, dtype=F64)
    pool[0] = 0.5
    return pool.to(dtype), slots_B


def check(update: Update, parts: tuple[Tensor, ...], pool: Tensor, slots_B: Tensor) -> None:
    """The twin, on clones, against the plain step and the float64 recurrence; what it must not touch stays."""
    live_B = slots_B > 0
    doubles, states = tuple(part.double() for part in parts), pool[slots_B].double()
    exact = update.recurrent(*doubles, states, RaggedLayout.build([1] * len(slots_B)))
    magnitude = update.magnitude(doubles, states)
    twin_pool, plain_pool = pool.clone(), pool.clone()
    twin_y, plain_y = update.twin(*parts, twin_pool, slots_B), update.plain(*parts, plain_pool, slots_B)
    assert twin_y.isfinite().all()
    assert_within_budget(twin_y[live_B], plain_y[live_B], exact[0][live_B], magnitude[0][live_B])
    states_B = slots_B[live_B]
    assert_within_budget(twin_pool[states_B], plain_pool[states_B], exact[1][live_B], magnitude[1][live_B])
    others_U = torch.ones(len(pool), dtype=torch.bool).index_fill(0, states_B, False)
    assert torch.equal(twin_pool[others_U].nan_to_num(7), pool[others_U].nan_to_num(7))


UPDATES = {
    "mamba2": lambda rows: mamba2(rows, 2, 6, 20, 12),
    "mamba2-one": lambda rows: mamba2(rows, 1, 1, 1, 1),
    "mamba2-granite": lambda rows: mamba2(rows, 1, 48, 32, 128),
    "gdn": lambda rows: delta(rows, 2, 6, 5, 24, per_channel=False),
    "gdn-wide": lambda rows: delta(rows, 4, 4, 64, 128, per_channel=False),
    "kda": lambda rows: delta(rows, 3, 3, 20, 24, per_channel=True),
    "kda-one": lambda rows: delta(rows, 1, 2, 1, 1, per_channel=True),
}
DTYPES = [(BF16, F32), (F32, F32), (F64, F64), (BF16, F64), (BF16, BF16), (F64, F32)]  # parts, pool


@pytest.mark.parametrize(("parts", "pool"), DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("name", UPDATES)
def test_a_step_keeps_the_budget_and_touches_nothing_else(
    name: str, rows: int, parts: torch.dtype, pool: torch.dtype
) -> None:
    update = UPDATES[name](rows)
    check(update, update.cast(parts), *pool_and_slots(update, rows, pool))


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_strides_do_not_matter(name: str) -> None:
    update = UPDATES[name](5)
    parts = update.cast(F32)
    pool, slots_B = pool_and_slots(update, 5, F32)
    expected_pool = pool.clone()
    expected = update.twin(*parts, expected_pool, slots_B)
    padded = pool.new_full((len(pool), 2, *update.state_shape), torch.nan)  # slots further apart than a state is long
    padded[:, 1] = pool
    strided_slots = torch.stack([slots_B, slots_B + 100], dim=1)[:, 0]
    y = update.twin(*(poisoned(part) for part in parts), padded[:, 1], strided_slots)
    assert torch.equal(y, expected)
    assert torch.equal(padded[:, 1].nan_to_num(7), expected_pool.nan_to_num(7))
    assert padded[:, 0].isnan().all()


@pytest.mark.parametrize("name", ["mamba2-granite", "gdn-wide", "kda"])
def test_threads_do_not_change_a_bit(name: str, use_threads) -> None:
    update = UPDATES[name](8)
    results = []
    for threads in (1, 2):
        use_threads(threads)
        pool, slots_B = pool_and_slots(update, 8, F32)
        results.append((update.twin(*update.cast(BF16), pool, slots_B), pool.nan_to_num(7)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_no_rows_are_no_work() -> None:
    update = UPDATES["mamba2"](1)
    x, dt, a, b, c = update.cast(F32)
    pool, slots_B = pool_and_slots(update, 1, F32)
    assert update.twin(x[:0], dt[:0], a, b[:0], c[:0], pool, slots_B[:0]).shape == (0, 6, 20)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda parts, pool, slots: (parts, pool, slots * 0 + 13),
            "slots_B.0. is 13, which is no slot of a pool of 13",
        ),
        (lambda parts, pool, slots: (parts, pool, -slots), "is no slot of a pool of 13"),
        (lambda parts, pool, slots: (parts, pool, slots.int()), "slots_B must be of dtype int64"),
        (lambda parts, pool, slots: (parts, pool, slots[:-1]), "must have size 4"),
        (lambda parts, pool, slots: (parts, pool[0], slots), "state_pool must have 4 axes, not 3"),
        (lambda parts, pool, slots: (parts, pool.mT.contiguous().mT, slots), "state_pool must be contiguous behind"),
        (lambda parts, pool, slots: ((parts[0][..., :-1], *parts[1:]), pool, slots), "must have size"),
        (lambda parts, pool, slots: ((*parts[:4], parts[4][:, :-1]), pool, slots), "must have size"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(name: str, change, complaint: str) -> None:
    update = UPDATES[name](5)
    pool, slots_B = pool_and_slots(update, 5, F32)
    parts, wrong_pool, wrong_slots = change(update.cast(F32), pool.clone(), slots_B)
    before = wrong_pool.clone()
    with pytest.raises(ValueError, match=complaint):
        update.twin(*parts, wrong_pool, wrong_slots)
    assert torch.equal(wrong_pool.nan_to_num(7), before.nan_to_num(7))


def test_heads_that_no_group_has_are_refused() -> None:
    update = mamba2(2, 4, 6, 3, 3)
    with pytest.raises(ValueError, match="b_BGN has 4 groups for 6 heads"):
        update.twin(*update.cast(F32), *pool_and_slots(update, 2, F32))

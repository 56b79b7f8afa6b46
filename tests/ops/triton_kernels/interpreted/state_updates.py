"""Recurrent steps by slot: every kernel against its twin, with NaN in each slot that no row names.

Shapes: as in `ops/mamba2.py` and `ops/delta_rule.py`; U slots of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import CustomOpDef

from hybrid_runtime.ops import gdn, kda, mamba2, triton_kernels
from tests.ops.triton_kernels.interpreted.budget import assert_within_budget

NUM_SLOTS = 11


@dataclass(frozen=True)
class Update:
    """A step of B rows: operands in the order of both forms, the pool's dtype and the slots."""

    kernel: CustomOpDef
    twin: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    state_shape: tuple[int, ...]
    slots_B: Tensor
    pool_dtype: torch.dtype

    def pool(self) -> Tensor:
        """Normal in the rows' slots, one half in slot 0, NaN in all others."""
        pool = torch.full((NUM_SLOTS + 1, *self.state_shape), math.nan, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        pool[self.slots_B] = torch.randn(len(self.slots_B), *self.state_shape, generator=generator, dtype=torch.float64)
        pool[0] = 0.5
        return pool.to(self.pool_dtype)

    def cast(self, tokens: torch.dtype, pool: torch.dtype) -> Update:
        """x, B, C, q, k, v in `tokens`; time steps, decays and β, like the pool, in `pool` but at least in float32."""
        gates = torch.promote_types(pool, torch.float32)
        is_gate = (False, True, True, False, False) if self.twin is mamba2.mamba2_step else (False,) * 3 + (True,) * 2
        operands = tuple(
            operand.to(gates if gate else tokens) for operand, gate in zip(self.operands, is_gate, strict=True)
        )
        return replace(self, operands=operands, pool_dtype=pool)

    def run(self, form: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and the pool behind the step."""
        pool = self.pool()
        return form(*self.operands, pool, self.slots_B), pool

    def run_exactly(self) -> tuple[Tensor, Tensor]:
        """The twin in float64 on the same, already rounded operands and states."""
        pool = self.pool().double()
        return self.twin(*(operand.double() for operand in self.operands), pool, self.slots_B), pool


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mamba2_update(slots: list[int], *, head_dim: int = 20, state_dim: int = 12) -> Update:
    num_rows = len(slots)
    operands = (
        normal(num_rows, 4, head_dim, seed=2),
        normal(num_rows, 4, seed=3).abs(),
        -normal(4, seed=4).abs(),
        normal(num_rows, 2, state_dim, seed=5),
        normal(num_rows, 2, state_dim, seed=6),
    )
    shape = (4, head_dim, state_dim)
    return Update(triton_kernels.mamba2_step, mamba2.mamba2_step, operands, shape, torch.tensor(slots), torch.float64)


def delta_update(slots: list[int], *, per_channel: bool, key_dim: int = 24, value_dim: int = 20) -> Update:
    """q and k of norm 1, as a model hands them over."""
    num_rows, num_heads = len(slots), 4
    q, k = (normal(num_rows, 2, key_dim, seed=seed) for seed in (2, 3))
    operands = (
        q / q.norm(dim=-1, keepdim=True),
        k / k.norm(dim=-1, keepdim=True),
        normal(num_rows, num_heads, value_dim, seed=4),
        -normal(num_rows, num_heads, *([key_dim] if per_channel else []), seed=5).abs(),
        normal(num_rows, num_heads, seed=6).sigmoid(),
    )
    kernel = triton_kernels.kda_step if per_channel else triton_kernels.gdn_step
    twin = kda.kda_step if per_channel else gdn.gdn_step
    return Update(kernel, twin, operands, (num_heads, value_dim, key_dim), torch.tensor(slots), torch.float64)


def gdn_update(slots: list[int]) -> Update:
    return delta_update(slots, per_channel=False)


def kda_update(slots: list[int]) -> Update:
    return delta_update(slots, per_channel=True)


UPDATES = [mamba2_update, gdn_update, kda_update]
SLOTS = [3, 0, 11, 1, 0, 2, 0, 9]


def check(update: Update) -> None:
    y, pool = update.run(update.kernel)
    plain_y, plain_pool = update.run(update.twin)
    exact_y, exact_pool = update.run_exactly()
    named = update.slots_B[update.slots_B > 0]
    # the longest sum is that of a row of a state with q or C: sqrt(K) or sqrt(N) values of the states' size, at most
    magnitude = exact_pool[update.slots_B].norm(dim=-1).max().item() * max(1.0, update.operands[-1].abs().max().item())
    assert_within_budget(y, plain_y, exact_y, magnitude)
    assert_within_budget(pool[named], plain_pool[named], exact_pool[named], magnitude)
    others = torch.ones(NUM_SLOTS + 1, dtype=torch.bool).index_fill(0, named, False)
    torch.testing.assert_close(pool[others], update.pool()[others], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", UPDATES)
@pytest.mark.parametrize(
    ("tokens", "pool"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_a_step_is_its_twin(make: Callable[[list[int]], Update], tokens: torch.dtype, pool: torch.dtype) -> None:
    check(make(SLOTS).cast(tokens, pool))


@pytest.mark.parametrize(
    "update",
    [
        mamba2_update([2, 0], head_dim=37, state_dim=128),
        delta_update([2, 0], per_channel=False, key_dim=128, value_dim=37),
        delta_update([2, 0], per_channel=True, key_dim=100, value_dim=37),
    ],
    ids=["mamba2", "gdn", "kda"],
)
def test_a_state_is_cut_into_several_programs(update: Update) -> None:
    check(update)


@pytest.mark.parametrize("make", UPDATES)
def test_operands_may_be_slices_of_wider_tensors(make: Callable[[list[int]], Update]) -> None:
    update = make([0, 7, 0])

    def slice_of_wider(operand: Tensor, excess: int) -> Tensor:
        wider = torch.full((operand.shape[0], 1 + operand[0].numel() + excess), math.nan, dtype=operand.dtype)
        own = wider[:, 1:-excess]
        own.copy_(operand.flatten(1))
        return own.unflatten(1, operand.shape[1:])

    operands = tuple(
        operand if operand.ndim == 1 else slice_of_wider(operand, excess)
        for excess, operand in enumerate(update.operands, start=1)
    )
    check(replace(update, operands=operands))


@pytest.mark.parametrize("make", UPDATES)
def test_operands_may_be_transposed(make: Callable[[list[int]], Update]) -> None:
    update = make([0, 7, 0])
    operands = tuple(
        operand.flip(0).t().contiguous().t() if operand.ndim == 2 else operand for operand in update.operands
    )
    check(replace(update, operands=operands))


@pytest.mark.parametrize("make", UPDATES)
def test_padding_rows_write_nothing_whatever_they_hold(make: Callable[[list[int]], Update]) -> None:
    update = make([0, 5, 0])
    for operand in update.operands:
        if operand.shape[0] == 3:
            operand[0::2] = math.nan
    _, pool = update.run(update.kernel)
    assert pool[0].eq(0.5).all()
    assert pool[5].isfinite().all()


@given(slots=st.lists(st.integers(0, NUM_SLOTS), min_size=1, max_size=4), make=st.sampled_from(UPDATES))
@settings(max_examples=12, deadline=None)
def test_any_mix_of_rows_and_padding(slots: list[int], make: Callable[[list[int]], Update]) -> None:
    distinct = [slot if slot not in slots[:row] else 0 for row, slot in enumerate(slots)]
    check(make(distinct))


@pytest.mark.parametrize("make", UPDATES)
def test_the_schema_names_what_changes(make: Callable[[list[int]], Update]) -> None:
    update = make([0, 7, 0]).cast(torch.float32, torch.float32)
    torch.library.opcheck(update.kernel, (*update.operands, update.pool(), update.slots_B), test_utils="test_schema")

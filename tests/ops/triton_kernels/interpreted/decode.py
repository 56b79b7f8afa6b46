"""Decode attention over pool slots against its twins, with NaN in every slot that must not be read.

Shapes: as in `ops/attention.py`; U slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.ops import triton_kernels
from hybrid_runtime.ops.attention import decode_attention, decode_mla
from hybrid_runtime.ops.triton_kernels import attention as kernels
from tests.ops.triton_kernels.interpreted.budget import assert_within_budget

Form = Callable[..., Tensor]
GROUPED: tuple[Form, Form] = triton_kernels.decode_attention, decode_attention
LATENT: tuple[Form, Form] = triton_kernels.decode_mla, decode_mla
SCALE = 0.4
SPLIT = kernels.MIN_SPLIT_TOKENS


@dataclass(frozen=True)
class Contexts:
    """Rows 1.. of a table, whose entries behind a context name a slot that is NaN; row 0 and slot 0 are for padding."""

    context_lens: tuple[int, ...]
    max_len: int

    @property
    def num_slots(self) -> int:
        return sum(self.context_lens) + 5

    def table(self) -> Tensor:
        slots = torch.randperm(self.num_slots - 1, generator=torch.Generator().manual_seed(0)).int() + 1
        table = torch.full((len(self.context_lens) + 2, self.max_len + 3), self.num_slots, dtype=torch.int32)
        table[0] = 0
        for row, length in enumerate(self.context_lens, start=1):
            table[row, :length], slots = slots[:length], slots[length:]
        return table

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Table, rows, lengths and their bound: every context, the last one first, around two rows of padding."""
        rows = torch.tensor([*range(len(self.context_lens), 0, -1), 0, 0])
        lens = torch.tensor([*reversed(self.context_lens), 1, 1])
        return self.table(), rows, lens, self.max_len

    def pool(self, *shape: int, seed: int) -> Tensor:
        """`[U, *shape]`: normal in owned slots, one half in slot 0, NaN in all others."""
        pool = torch.full((self.num_slots + 1, *shape), torch.nan, dtype=torch.float64)
        table = self.table()
        for row, length in enumerate(self.context_lens, start=1):
            pool[table[row, :length]] = normal(length, *shape, seed=seed + row)
        pool[0] = 0.5
        return pool

    def keys_and_values(self, num_heads: int, num_groups: int, dtype: torch.dtype, pool: torch.dtype) -> list[Tensor]:
        q_BHD = normal(len(self.context_lens) + 2, num_heads, 24, seed=1)
        k_pool, v_pool = self.pool(num_groups, 24, seed=10), self.pool(num_groups, 20, seed=90)
        return [q_BHD.to(dtype), k_pool.to(pool), v_pool.to(pool)]

    def latents(self, num_heads: int, rope_dim: int, dtype: torch.dtype) -> list[Tensor]:
        num_rows, latent_dim = len(self.context_lens) + 2, 12
        return [
            normal(num_rows, num_heads, 7, seed=1).to(dtype),
            normal(num_rows, num_heads, rope_dim, seed=2).to(dtype),
            self.pool(latent_dim + rope_dim, seed=10).to(dtype),
            (normal(num_heads, 7, latent_dim, seed=3) / 2).to(dtype),
            (normal(num_heads, 5, latent_dim, seed=4) / 2).to(dtype),
        ]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(contexts: Contexts, operands: list[Tensor], *, window: int | None = None) -> None:
    check_forms(GROUPED, contexts, operands, largest(operands[2]), window=window)


def check_latent(contexts: Contexts, operands: list[Tensor]) -> None:
    # a head's values are sums of 12 latent channels with weights of about one half
    check_forms(LATENT, contexts, operands, 12 * largest(operands[2]) * largest(operands[4]))


def check_forms(
    forms: tuple[Form, Form], contexts: Contexts, operands: list[Tensor], magnitude: float, **options: int | None
) -> None:
    kernel, twin = forms
    arguments = contexts.arguments()
    o_BHV = kernel(*operands, *arguments, scale=SCALE, **options)
    plain_BHV = twin(*operands, *arguments, scale=SCALE, **options)
    exact_BHV = twin(*(operand.double() for operand in operands), *arguments, scale=SCALE, **options)
    assert_within_budget(o_BHV, plain_BHV, exact_BHV, magnitude)


def largest(tensor: Tensor) -> float:
    return tensor.double().abs().nan_to_num(0.0).max().item()


EDGES = Contexts((1, SPLIT, SPLIT + 1, 16, 17), 2 * SPLIT)


@pytest.mark.parametrize(
    ("dtype", "pool"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_it_is_its_twin(dtype: torch.dtype, pool: torch.dtype) -> None:
    check(EDGES, EDGES.keys_and_values(6, 2, dtype, pool))


@pytest.mark.parametrize("window", [1, SPLIT - 1, SPLIT, SPLIT + 1, 1000])
def test_windows_of_every_kind(window: int) -> None:
    contexts = Contexts((1, SPLIT, SPLIT + 2, 3 * SPLIT), 4 * SPLIT)
    check(contexts, contexts.keys_and_values(2, 1, torch.bfloat16, torch.bfloat16), window=window)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(1, 1), (3, 3), (34, 1), (66, 2)])
def test_any_number_of_heads_shares_a_key(num_heads: int, num_groups: int) -> None:
    contexts = Contexts((SPLIT + 1, 3), SPLIT + 1)
    check(contexts, contexts.keys_and_values(num_heads, num_groups, torch.float64, torch.float64))


@pytest.mark.parametrize("max_splits", [1, 3])
def test_long_contexts_have_longer_splits(max_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few splits, one has 1 to 4 of the shortest length; a context may end at, before or behind any."""
    monkeypatch.setattr(kernels, "MAX_SPLITS", max_splits)
    contexts = Contexts((3 * SPLIT, 3 * SPLIT + 1, 4 * SPLIT, 2), 4 * SPLIT)
    check(contexts, contexts.keys_and_values(2, 1, torch.bfloat16, torch.bfloat16))
    check(contexts, contexts.keys_and_values(2, 1, torch.bfloat16, torch.bfloat16), window=3 * SPLIT + 1)


def test_a_bound_far_beyond_the_contexts_changes_nothing() -> None:
    short, long = Contexts((5, SPLIT + 1), SPLIT + 1), Contexts((5, SPLIT + 1), 8 * SPLIT)
    results = []
    for contexts in (short, long):
        operands = contexts.keys_and_values(2, 1, torch.float64, torch.float64)
        results.append(triton_kernels.decode_attention(*operands, *contexts.arguments(), scale=SCALE))
    assert results[0].equal(results[1])


@given(
    context_lens=st.lists(st.integers(1, 2 * SPLIT + 2), min_size=1, max_size=3), window=st.none() | st.integers(1, 150)
)
@settings(max_examples=8, deadline=None)
def test_any_contexts(context_lens: list[int], window: int | None) -> None:
    contexts = Contexts(tuple(context_lens), 2 * SPLIT + 2)
    check(contexts, contexts.keys_and_values(2, 1, torch.float64, torch.float64), window=window)


def test_weights_keep_more_digits_than_bfloat16_has() -> None:
    """Of two results that differ by d before they are rounded, a share d / spacing differs behind.

    Weights in two parts err by 2⁻¹⁷ and flip 0.2 % of bfloat16 results; weights rounded to bfloat16 flip some 10 %.
    """
    operands = EDGES.keys_and_values(6, 2, torch.bfloat16, torch.bfloat16)
    kernel, twin = (form(*operands, *EDGES.arguments(), scale=SCALE) for form in GROUPED)
    assert kernel.ne(twin).double().mean() < 0.02


def test_large_scores_do_not_overflow() -> None:
    """Scores of some thousands, whose exponentials only exist relative to the largest one."""
    contexts = Contexts((SPLIT + 1, 9), SPLIT + 1)
    q_BHD, k_pool, v_pool = contexts.keys_and_values(2, 1, torch.float64, torch.float64)
    check(contexts, [100 * q_BHD, 10 * k_pool, v_pool])


def test_queries_may_be_slices_of_a_wider_projection() -> None:
    contexts = Contexts((SPLIT + 1, 3), SPLIT + 1)
    q_BHD, k_pool, v_pool = contexts.keys_and_values(6, 2, torch.float64, torch.float64)
    with_gate = torch.cat([q_BHD, q_BHD.new_full(q_BHD.shape, torch.nan)], dim=-1)
    check(contexts, [with_gate[..., :24], k_pool, v_pool])


@pytest.mark.parametrize(
    ("num_heads", "rope_dim", "dtype"),
    [
        (5, 6, torch.float64),
        (5, 0, torch.float64),
        (33, 6, torch.float64),
        (5, 6, torch.float32),
        (5, 6, torch.bfloat16),
        (5, 0, torch.bfloat16),
    ],
)
def test_latent_attention_is_its_twin(num_heads: int, rope_dim: int, dtype: torch.dtype) -> None:
    contexts = Contexts((1, SPLIT + 1), 2 * SPLIT)
    check_latent(contexts, contexts.latents(num_heads, rope_dim, dtype))


def test_the_schemas_name_what_changes() -> None:
    """Nothing."""
    contexts = Contexts((SPLIT + 1, 3), SPLIT + 1)
    table, *rest = contexts.arguments()
    operands = contexts.keys_and_values(2, 1, torch.float32, torch.float32)
    options = {"scale": SCALE, "window": 5}
    torch.library.opcheck(kernels.decode_attention, (*operands, table, *rest), options, test_utils="test_schema")
    pool = contexts.pool(24, seed=3).float()
    latents = (operands[0], pool, 20, table, *rest)
    torch.library.opcheck(kernels.decode_latents, latents, {"scale": SCALE}, test_utils="test_schema")


def test_nothing_that_is_compiled_in_depends_on_the_number_of_rows() -> None:
    """One compilation serves every batch: what kernels are compiled for must be that of all, what they are given fits
    it."""
    few, many = (
        kernels._Problem(
            num_rows=num_rows,
            num_heads=12,
            num_groups=4,
            key_dim=128,
            extra_dim=0,
            value_dim=128,
            num_visible=32768,
            window=None,
            keys_are_values=False,
            is_narrow=True,
        )
        for num_rows in (1, 64)
    )
    assert few.constants() == many.constants()
    assert few.max_splits == many.max_splits >= few.num_splits > many.num_splits
    assert "num_splits" not in {name.lower() for name in few.constants()}

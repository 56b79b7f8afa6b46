"""Attention of a prefill in bfloat16 against the PyTorch form, with NaN in every slot that must not be read.

Shapes: as in `ops/attention.py`; U slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from hybrid_runtime.ops import attention, cpu_kernels
from hybrid_runtime.ops.cpu_kernels import twins
from hybrid_runtime.ops.ragged import RaggedLayout
from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned

BF16 = torch.bfloat16
SCALE = 0.3
NUM_PADDING = 2
# New tokens and contexts: around a tile's rows, a panel's keys and a chunk's, alone and behind a prefix.
LENGTHS = (1, 11, 13, 33, 256, 40)
CONTEXTS = (1, 31, 13, 65, 257, 560)


@dataclass(frozen=True)
class Prefill:
    """Sequences in rows 1.. of a table whose stale entries, like slots that nobody owns, are poison."""

    q_LHD: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    rows_S: Tensor
    contexts_S: Tensor
    layout: RaggedLayout
    window: int | None = None

    @classmethod
    def draw(
        cls,
        lengths: tuple[int, ...],
        contexts: tuple[int, ...],
        heads: int = 6,
        groups: int = 2,
        key_dim: int = 16,
        value_dim: int = 16,
        seed: int = 0,
        window: int | None = None,
    ) -> Prefill:
        generator = torch.Generator().manual_seed(seed)
        num_slots = sum(contexts)
        slots = (torch.randperm(num_slots, generator=generator) + 1).int()
        table = torch.full((len(contexts) + 2, max(contexts) + 3), num_slots + 1, dtype=torch.int32)
        rows_S = torch.randperm(len(contexts), generator=generator) + 1
        for row, own in zip(rows_S, slots.split(contexts), strict=True):
            table[row, : len(own)] = own

        def draw_pool(dim: int) -> Tensor:
            values = torch.randn(num_slots + 2, groups, dim, generator=generator).to(BF16)
            values[0] = 0
            values[-1] = torch.nan
            return values

        q_LHD = torch.randn(sum(lengths) + NUM_PADDING, heads, key_dim, generator=generator).to(BF16)
        q_LHD[sum(lengths) :] = torch.nan
        layout = RaggedLayout.build(lengths, num_tokens=len(q_LHD))
        contexts_S = torch.tensor(contexts)
        return cls(q_LHD, draw_pool(key_dim), draw_pool(value_dim), table, rows_S, contexts_S, layout, window)

    def run(self, form: Callable[..., Tensor] = cpu_kernels.prefill_attention) -> Tensor:
        table = (self.table, self.rows_S, self.contexts_S)
        return form(self.q_LHD, self.k_pool, self.v_pool, *table, self.layout, scale=SCALE, window=self.window)

    def in_float64(self) -> Prefill:
        return replace(self, q_LHD=self.q_LHD.double(), k_pool=self.k_pool.double(), v_pool=self.v_pool.double())


def check(case: Prefill) -> None:
    out_LHV, plain_LHV = case.run(), case.run(attention.prefill_attention)
    exact_LHV = case.in_float64().run(attention.prefill_attention)
    magnitude_LHV = exact_LHV.abs()
    assert not out_LHV[-NUM_PADDING:].any()
    assert_within_budget(out_LHV, plain_LHV, exact_LHV, magnitude_LHV)


@pytest.mark.parametrize("window", [None, 1, 31, 64, 300])
@pytest.mark.parametrize(
    ("heads", "groups", "key_dim", "value_dim"),
    [(1, 1, 1, 1), (9, 3, 24, 20), (12, 4, 64, 64), (7, 1, 72, 40), (2, 2, 31, 33), (16, 1, 8, 96)],
)
def test_every_shape_keeps_the_budget(
    heads: int, groups: int, key_dim: int, value_dim: int, window: int | None
) -> None:
    check(Prefill.draw(LENGTHS, CONTEXTS, heads, groups, key_dim, value_dim, window=window))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequences_keep_the_budget(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    contexts = [length + data.draw(st.sampled_from([0, 1, 30, 250])) for length in lengths]
    window = data.draw(st.none() | st.integers(1, 80))
    groups, per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 13))
    dims = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    seed = data.draw(st.integers(0, 99))
    check(Prefill.draw(tuple(lengths), tuple(contexts), groups * per_group, groups, *dims, seed, window))


def test_large_scores_do_not_overflow() -> None:
    """Later keys score higher than all before, so that every chunk changes the largest score by a lot."""
    case = Prefill.draw((600,), (600,), heads=2, groups=1)
    case.q_LHD[:600] = 8
    for position, slot in enumerate(case.table[case.rows_S[0], :600].tolist()):
        case.k_pool[slot] = position / 8
    check(case)


def test_strides_make_no_difference() -> None:
    case = Prefill.draw(LENGTHS, CONTEXTS)
    k_pool, v_pool = (pad(pool, (3, 2, 1, 0), value=torch.nan)[:, 1:, 3:-2] for pool in (case.k_pool, case.v_pool))
    assert replace(case, q_LHD=poisoned(case.q_LHD), k_pool=k_pool, v_pool=v_pool).run().equal(case.run())


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_depends_on_what_it_sees_alone(window: int | None) -> None:
    """Bit for bit the same beside other sequences, in another order, and by any number of threads."""
    case = Prefill.draw(LENGTHS, CONTEXTS, window=window)
    together = case.run()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        assert case.run().equal(together)
    finally:
        torch.set_num_threads(threads)
    for place, (start, length) in enumerate(zip(case.layout.starts, case.layout.lengths, strict=True)):
        alone = replace(
            case,
            q_LHD=case.q_LHD[start : start + length],
            rows_S=case.rows_S[place : place + 1],
            contexts_S=case.contexts_S[place : place + 1],
            layout=RaggedLayout.build([length]),
        )
        assert alone.run().equal(together[start : start + length])


@pytest.mark.parametrize("pool", ["k_pool", "v_pool"])
def test_a_nan_comes_out_where_it_is_seen(pool: str) -> None:
    """Of two sequences, one has NaN in its first key or value: all of its tokens are NaN, none of the other's."""
    case = Prefill.draw((5, 7), (40, 7))
    getattr(case, pool)[case.table[case.rows_S[0], 0].long()] = torch.nan
    out_LHV = case.run()
    assert out_LHV[:5].isnan().all()
    assert not out_LHV[5:].isnan().any()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (BF16, torch.float32), (torch.float32, BF16)])
def test_other_dtypes_run_the_plain_form(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case = Prefill.draw((5, 7), (40, 7))
    query, pool = dtypes
    case = replace(case, q_LHD=case.q_LHD.to(query), k_pool=case.k_pool.to(pool), v_pool=case.v_pool.to(pool))
    assert case.run().equal(case.run(attention.prefill_attention))


def test_a_processor_that_does_not_multiply_bfloat16_runs_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Prefill.draw((5, 70), (40, 70))
    monkeypatch.setattr(twins, "MULTIPLIES_BFLOAT16", False)
    assert case.run().equal(case.run(attention.prefill_attention))


BAD: dict[str, Callable[[Prefill], dict[str, Any]]] = {
    "is no row": lambda case: {"rows_S": case.rows_S + 90},
    "can't have 5 tokens of a context of 1": lambda case: {"contexts_S": case.contexts_S * 0 + 1},
    "can't have 5 tokens of a context of 940": lambda case: {"contexts_S": case.contexts_S + 900},
    "is no slot": lambda case: {"table": case.table + 10_000},
    "req_to_token must be of dtype int32": lambda case: {"table": case.table.long()},
    "2 groups for 5 heads": lambda case: {"q_LHD": case.q_LHD[:, :5].contiguous()},
    "k_pool must have size 3": lambda case: {"q_LHD": case.q_LHD[..., :3].contiguous()},
    "v_pool must have size": lambda case: {"v_pool": case.v_pool[:-1]},
    "k_pool must be contiguous": lambda case: {"k_pool": case.k_pool.mT.contiguous().mT},
    "window must be at least 1": lambda case: {"window": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message: str) -> None:
    case = Prefill.draw((5, 7), (40, 7))
    with pytest.raises(ValueError, match=message):
        replace(case, **BAD[message](case)).run()


def test_a_compiled_graph_keeps_it() -> None:
    case = Prefill.draw((5, 7), (40, 7))

    def double(q_LHD: Tensor) -> Tensor:
        return 2 * replace(case, q_LHD=q_LHD + 0).run()

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert compiled(case.q_LHD[:, :, :]).nan_to_num().equal((2 * case.run()).nan_to_num())

"""Decode attention over the pool against the plain definition, with NaN in every slot that must not be read.

Shapes: as in `ops/attention.py`; U slots of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops import attention, cpu_kernels
from hybrid_runtime.ops.attention import attention_reference
from tests.ops.cpu_kernels.budget import assert_within_budget, poisoned

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LENGTHS = (1, 2, 63, 64, 65, 200)  # around the length of a piece of a context
SCALE = 0.3


@dataclass(frozen=True)
class Decode:
    """One row for each of LENGTHS and a padding row; stale table entries and unowned slots are poison."""

    q_BHD: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    rows_B: Tensor
    lens_B: Tensor

    @classmethod
    def draw(
        cls, heads: int, groups: int, key_dim: int, value_dim: int, dtype: torch.dtype, pool: torch.dtype
    ) -> Decode:
        generator = torch.Generator().manual_seed(heads * key_dim)
        num_slots = sum(LENGTHS)
        slots = (torch.randperm(num_slots, generator=generator) + 1).int()
        table = torch.full((len(LENGTHS) + 3, 256), num_slots + 1, dtype=torch.int32)  # names a slot of NaN
        rows_B = torch.randperm(len(LENGTHS) + 2, generator=generator)[: len(LENGTHS)] + 1
        for row, own in zip(rows_B, slots.split(LENGTHS), strict=True):
            table[row, : len(own)] = own
        table[0] = 0

        def draw_pool(dim: int) -> Tensor:
            values = torch.randn(num_slots + 2, groups, dim, generator=generator, dtype=F64).to(pool)
            values[0] = 0
            values[-1] = torch.nan
            return values

        q_BHD = torch.randn(len(LENGTHS) + 1, heads, key_dim, generator=generator, dtype=F64).to(dtype)
        lens_B = torch.tensor([*LENGTHS, 1])
        return cls(
            q_BHD, draw_pool(key_dim), draw_pool(value_dim), table, torch.cat([rows_B, rows_B.new_zeros(1)]), lens_B
        )

    def run(self, form, window: int | None = None) -> Tensor:
        operands = (self.q_BHD, self.k_pool, self.v_pool, self.table, self.rows_B, self.lens_B)
        return form(*operands, 256, scale=SCALE, window=window)

    def reference(self, window: int | None) -> Tensor:
        """`attention_reference`, one row's last token at a time, in float64."""
        outputs = []
        for q_HD, row, length in zip(self.q_BHD, self.rows_B, self.lens_B.tolist(), strict=True):
            slots_T = self.table[row, :length]
            k_TGD, v_TGV = self.k_pool[slots_T].double(), self.v_pool[slots_T].double()
            outputs.append(attention_reference(q_HD[None].double(), k_TGD, v_TGV, scale=SCALE, window=window)[0])
        return torch.stack(outputs)


@pytest.mark.parametrize(
    ("dtype", "pool"), [(BF16, BF16), (F32, F32), (F64, F64), (F32, BF16), (BF16, F32), (F64, F32)]
)
@pytest.mark.parametrize("window", [None, 1, 64, 70])
@pytest.mark.parametrize(
    ("heads", "groups", "key_dim", "value_dim"),
    [(1, 1, 1, 1), (9, 3, 24, 20), (12, 4, 64, 64), (7, 1, 72, 40), (2, 2, 31, 33)],
)
def test_every_shape_keeps_the_budget(
    heads: int, groups: int, key_dim: int, value_dim: int, window: int | None, dtype: torch.dtype, pool: torch.dtype
) -> None:
    decode = Decode.draw(heads, groups, key_dim, value_dim, dtype, pool)
    exact = decode.reference(window)
    # Scores err by their terms' size times eps, and so do the weights, of which the values are averages.
    score_size = SCALE * decode.q_BHD.double().norm(dim=-1).max() * decode.k_pool[:-1].double().norm(dim=-1).max()
    magnitude = torch.full_like(exact, (1 + score_size) * decode.v_pool[:-1].abs().max().double().item())
    assert_within_budget(
        decode.run(cpu_kernels.decode_attention, window),
        decode.run(attention.decode_attention, window),
        exact,
        magnitude,
    )


def test_a_large_score_does_not_overflow() -> None:
    decode = Decode.draw(4, 2, 16, 16, F32, F32)
    decode = replace(decode, q_BHD=decode.q_BHD * 1e4)
    torch.testing.assert_close(
        decode.run(cpu_kernels.decode_attention), decode.reference(None).float(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    decode = Decode.draw(6, 2, 24, 20, dtype, dtype)
    expected = decode.run(cpu_kernels.decode_attention)
    both = torch.cat([decode.v_pool, decode.k_pool, decode.v_pool], dim=-1)  # keys and values in one pool
    lens_B = torch.stack([decode.lens_B, decode.lens_B + 300], dim=1)[:, 0]
    rows_B = torch.stack([decode.rows_B, decode.rows_B + 300], dim=1)[:, 0]
    table = decode.table.mT.contiguous().mT
    strided = Decode(poisoned(decode.q_BHD), both[..., 20:44], both[..., :20], table, rows_B, lens_B)
    assert torch.equal(strided.run(cpu_kernels.decode_attention), expected)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_neither_threads_nor_other_rows_change_a_bit(dtype: torch.dtype, use_threads) -> None:
    decode = Decode.draw(12, 4, 64, 64, dtype, dtype)
    use_threads(1)
    together = decode.run(cpu_kernels.decode_attention)
    use_threads(2)
    assert torch.equal(decode.run(cpu_kernels.decode_attention), together)
    for row in range(len(LENGTHS)):
        alone = replace(
            decode,
            q_BHD=decode.q_BHD[row : row + 1],
            rows_B=decode.rows_B[row : row + 1],
            lens_B=decode.lens_B[row : row + 1],
        )
        assert torch.equal(alone.run(cpu_kernels.decode_attention)[0], together[row])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: replace(d, table=d.table + 1000), "which the pool doesn't have"),
        (lambda d: replace(d, table=-d.table), "which the pool doesn't have"),
        (lambda d: replace(d, table=d.table.long()), "req_to_token must be of dtype int32"),
        (lambda d: replace(d, lens_B=d.lens_B + 100), "not in 1..256"),
        (lambda d: replace(d, lens_B=d.lens_B - 1), "not in 1..256"),
        (lambda d: replace(d, rows_B=d.rows_B + 5), "which is no row of the table"),
        (lambda d: replace(d, rows_B=d.rows_B[1:]), "request_rows_B must have size 7"),
        (lambda d: replace(d, k_pool=d.k_pool[..., :-1]), "k_pool must have size 24 on axis 2"),
        (lambda d: replace(d, k_pool=d.k_pool[1:]), "v_pool must have size"),
        (lambda d: replace(d, k_pool=poisoned(d.k_pool)), "k_pool must be contiguous behind its first 2 axes"),
        (lambda d: replace(d, q_BHD=d.q_BHD[:, :5]), "k_pool has 2 groups for 5 heads"),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        change(Decode.draw(6, 2, 24, 20, F32, F32)).run(cpu_kernels.decode_attention)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window must be at least 1"):
        Decode.draw(6, 2, 24, 20, F32, F32).run(cpu_kernels.decode_attention, window=0)


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("rope_dim", [0, 8])
def test_latent_attention_keeps_the_budget(rope_dim: int, dtype: torch.dtype) -> None:
    decode = Decode.draw(6, 1, 40 + rope_dim, 1, dtype, dtype)
    generator = torch.Generator().manual_seed(1)
    w_k_HDR = torch.randn(6, 12, 40, generator=generator, dtype=F64).to(dtype) / 4
    w_v_HVR = torch.randn(6, 10, 40, generator=generator, dtype=F64).to(dtype) / 4
    q_nope_BHD = torch.randn(len(LENGTHS) + 1, 6, 12, generator=generator, dtype=F64).to(dtype)
    q_rope_BHE = decode.q_BHD[..., 40:]
    latent_pool = decode.k_pool[:, 0]

    def run(form, to: torch.dtype) -> Tensor:
        floats = [x.to(to) for x in (q_nope_BHD, q_rope_BHE, latent_pool, w_k_HDR, w_v_HVR)]
        return form(*floats, decode.table, decode.rows_B, decode.lens_B, 256, scale=SCALE)

    twin, plain = run(cpu_kernels.decode_mla, dtype), run(attention.decode_mla, dtype)
    exact = run(attention.decode_mla, F64)
    magnitude = exact.abs().max() * 40 * torch.ones_like(exact)  # two sums over the latent dim around the attention
    assert_within_budget(twin, plain, exact, magnitude)

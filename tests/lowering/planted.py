"""Steps with one fault each, and sound ones beside them. Small: what they show does not depend on sizes.

Shapes: B rows, D channels, U slots of a pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import triton_op, wrap_triton

from hybrid_runtime.graphs.lowering.findings import Kind
from hybrid_runtime.graphs.lowering.step import PoolArgument, Step, Trial

B, D, U = 8, 32, 257
HOST, UNSAFE, POOL = Kind.HOST_WORK, Kind.UNSAFE_OPERATION, Kind.POOL_COPY


@dataclass(frozen=True)
class Case:
    """A function of `x` `[B, D]`, `slots` `[B]` and a pool, and the kinds of findings it must give (none if sound)."""

    function: Callable[[Tensor, Tensor, Tensor], Any]
    expected: frozenset[Kind]
    pool_shape: tuple[int, ...] = (U, D)
    slot_axis: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    def step(self) -> Step:
        """The case as a step, with a trial of two fillings of the same tensors."""
        with FakeTensorMode():
            x_BD, slots_B, pool = self._tensors("cuda")
        return Step(
            name=self.name,
            function=self.function,
            arguments=(x_BD, slots_B, pool),
            pools=(PoolArgument("pool", pool, B, self.slot_axis),),
            options=self.options,
            trial=self._trial() if Kind.DIFFERS_BETWEEN_RUNS in self.expected or not self.expected else None,
        )

    def _tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        x_BD = torch.zeros(B, D, device=device)
        return x_BD, torch.zeros(B, dtype=torch.int64, device=device), torch.zeros(self.pool_shape, device=device)

    def _trial(self) -> Trial:
        tensors = self._tensors("cpu")

        def fill(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            tensors[0].normal_(mean=seed, generator=generator)
            tensors[1].random_(1, U, generator=generator)
            tensors[2].normal_(generator=generator)

        return Trial(lambda: self.function(*tensors), tensors, [lambda: fill(1), lambda: fill(-2)])


def update(pool: Tensor, slots_B: Tensor, x_BD: Tensor) -> Tensor:
    """Gather, update, scatter on a whole input: the form that stays in place."""
    state_BD = 0.5 * pool[slots_B] + x_BD
    pool.index_put_((slots_B,), state_BD)
    return state_BD.sum(-1)


def item(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x * x.max().item()


def boolean_mask(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x[x > 0].sum()


def cpu_tensor(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x + torch.arange(3).sum().float()


def host_to_device(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x * torch.tensor([2.0] * D).to(x.device)


def device_to_host(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return (x + 1).cpu()


def random_numbers(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def returns_a_number(x: Tensor, slots: Tensor, pool: Tensor) -> Any:
    return x + 1, x.shape[0]


_calls = itertools.count()


def counter(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x * float(next(_calls))


def branch_on_data(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x * 2 if bool((x > 0).any()) and float(x.mean()) > 0 else x - 1


def resized_input(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    x.resize_(x.shape[0] * 64, x.shape[1])
    return x[:B] + 1


def viewed_pool(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    for layer in range(2):
        pool.view(2 * U, D).index_put_((layer * U + slots,), x)
    return x + 1


def shifted_pool(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    pool[1:].copy_(torch.cat([x[:1], pool[1:-1]]))
    return x + 1


def slice_of_stacked_pools(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    pool[1].index_put_((slots,), x)
    return x + 1


def pool_in_half_precision(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return pool.bfloat16() @ x.bfloat16().T


def whole_pool_read(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x + pool.abs().amax(0)


@torch.compiler.nested_compile_region
def _region(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return x + update(pool, slots, x)[:, None]


def pool_in_a_region(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return _region(_region(x, slots, pool), slots, pool)


@triton.jit
def _too_wide_kernel(a_ptr, y_ptr, num_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Accumulates a matrix product in 256 registers of each thread of one warp, and needs others for its operands."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(num_blocks):
        inner = block * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows[:, None] * 1024 + inner[None, :])
        b = tl.load(a_ptr + inner[:, None] * 1024 + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(y_ptr + rows[:, None] * COLUMNS + columns[None, :], total)


@triton_op("lowering_tests::too_wide", mutates_args=())
def _too_wide(a: Tensor) -> Tensor:
    y = a.new_empty(64, 128, dtype=torch.float32)
    wrap_triton(_too_wide_kernel)[(1,)](a, y, 4, ROWS=64, COLUMNS=128, BLOCK=16, num_warps=1)
    return y


def spilling_kernel(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return _too_wide(x.new_zeros(1024, 1024, dtype=torch.float16))


def in_place(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    return update(pool, slots, x)


def scalars_of_the_device(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    position_D = torch.arange(D, device=x.device)
    return torch.where(position_D < slots[:, None], x * 2.0, torch.full((), 3.0, device=x.device))


@triton.jit
def _add_rows_kernel(pool_ptr, slots_ptr, x_ptr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    target = pool_ptr + tl.load(slots_ptr + row) * WIDTH + columns
    tl.store(target, tl.load(target) + tl.load(x_ptr + row * WIDTH + columns))


@triton_op("lowering_tests::add_rows", mutates_args={"pool"})
def _add_rows(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    wrap_triton(_add_rows_kernel)[(x.shape[0],)](pool, slots, x, WIDTH=x.shape[1])


@_add_rows.register_kernel("cpu")
def _(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    pool.index_put_((slots,), x, accumulate=True)


def kernel_on_the_whole_pool(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    _add_rows(pool, slots, x * 2)
    return x + 1


def stacked_pool_by_index(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    pool.index_put_((torch.ones_like(slots), slots), x)
    return x + 1


def _faulty(function: Callable[..., Any], *kinds: Kind, **options: Any) -> Case:
    return Case(function, frozenset(kinds), **options)


STACKED: dict[str, Any] = {"pool_shape": (2, U, D), "slot_axis": 1}

FAULTS: Sequence[Case] = (
    _faulty(item, UNSAFE),
    _faulty(boolean_mask, UNSAFE),
    _faulty(cpu_tensor, UNSAFE, HOST, options={"cpp.vec_isa_ok": False}),  # else it tries the compiler, for seconds
    _faulty(host_to_device, UNSAFE),
    _faulty(device_to_host, UNSAFE, HOST),
    _faulty(random_numbers, UNSAFE),
    _faulty(returns_a_number, UNSAFE),
    _faulty(counter, Kind.DIFFERS_BETWEEN_RUNS),
    _faulty(branch_on_data, UNSAFE, Kind.DIFFERS_BETWEEN_RUNS),
    _faulty(resized_input, Kind.DIFFERS_BETWEEN_RUNS),
    _faulty(viewed_pool, POOL, **STACKED),
    _faulty(shifted_pool, POOL),
    _faulty(slice_of_stacked_pools, POOL, **STACKED),
    _faulty(pool_in_half_precision, POOL, Kind.MISALIGNED_COPY),
    _faulty(whole_pool_read, POOL, Kind.MISALIGNED_COPY),
    _faulty(pool_in_a_region, Kind.MISALIGNED_COPY),
    _faulty(spilling_kernel, Kind.SPILL),
)

SOUND: Sequence[Case] = (
    Case(in_place, frozenset()),
    Case(scalars_of_the_device, frozenset()),
    Case(kernel_on_the_whole_pool, frozenset()),
    Case(stacked_pool_by_index, frozenset(), **STACKED),
)

"""Bytes and launches of the Triton kernels, beside what Inductor makes of their PyTorch forms. No GPU needed.

    python profiles/kernel_bytes.py [--rows 8] [--context-len 1024] [--kernels-only] [--json]

"Needed" is what any implementation moves: every operand, state and visible key once, every result once. The rest is
told by the lowering report, which compiles each form for an H200 and counts what its kernels depend on. A hand-written
kernel is opaque to it, and counts its operands, its results and the slots that its step touches. Sizes are those of
Granite 4.0 (Mamba-2), Qwen3-Next (GDN) and Kimi Linear (KDA, latent attention), and attention of 32 heads over 8 key
heads of 128 channels; states are float32, keys bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_runtime.graphs.lowering.examine import examine
from hybrid_runtime.graphs.lowering.fake_cuda import pretend_cuda
from hybrid_runtime.graphs.lowering.report import StepReport
from hybrid_runtime.graphs.lowering.step import PoolArgument, Step
from hybrid_runtime.ops import attention, conv, draw, gdn, kda, mamba2, triton_kernels

NUM_STATE_SLOTS = 1009  # a prime, as the report wants it
NUM_KV_SLOTS = 1_000_003
NUM_COPIED_LAYERS = 8
Form = Callable[..., Any]


@dataclass(frozen=True)
class Comparison:
    """A PyTorch form and its kernel, called with the same fake tensors.

    `pools`: those among `arguments` that are indexed by slot, and how many slots one call touches; `results`: bytes
    that a call must write, in and outside of pools; `is_captured`: whether it is part of a captured step.
    """

    name: str
    twin: Form
    kernel: Form
    arguments: tuple[Any, ...]
    pools: tuple[PoolArgument, ...]
    results: int
    is_captured: bool = True

    @property
    def needed(self) -> int:
        """Bytes that any form reads and writes."""
        pools = {id(pool.tensor): pool.bytes_touched for pool in self.pools}
        tensors = [argument for argument in self.arguments if isinstance(argument, Tensor)]
        return sum(pools.get(id(tensor), tensor.nbytes) for tensor in tensors) + self.results

    def examine(self, form: Form) -> StepReport:
        # a lambda, since the report compiles a function anew for each step
        step = Step(self.name, lambda *arguments: form(*arguments), self.arguments, self.pools, self.is_captured)
        return examine(step)


def comparisons(num_rows: int, context_len: int) -> Iterator[Comparison]:
    """Every kernel, for a decode of `num_rows` rows with contexts of `context_len` tokens."""
    mode = FakeTensorMode()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with mode:
            return torch.empty(*shape, dtype=dtype, device="cuda")

    slots_B = empty(num_rows, dtype=torch.int64)
    yield _mamba2(empty, slots_B)
    yield _delta("gdn_step", gdn.gdn_step, triton_kernels.gdn_step, empty, slots_B, num_key_heads=16)
    yield _delta("kda_step", kda.kda_step, triton_kernels.kda_step, empty, slots_B, num_key_heads=32)
    yield _conv(empty, slots_B)
    table = empty(num_rows, context_len, dtype=torch.int32)
    yield _attention(empty, table, slots_B)
    yield _latent_attention(empty, table, slots_B)
    yield _copies(empty, slots_B)
    yield _draw(empty, slots_B)


def _mamba2(empty: Callable[..., Tensor], slots_B: Tensor) -> Comparison:
    num_rows, heads, head_dim, state_dim = len(slots_B), 48, 64, 128
    x_BHP, b_BGN = empty(num_rows, heads, head_dim), empty(num_rows, 1, state_dim)
    pool = PoolArgument("ssm", empty(NUM_STATE_SLOTS, heads, head_dim, state_dim), num_rows)
    arguments = (x_BHP, empty(num_rows, heads), empty(heads), b_BGN, empty(*b_BGN.shape), pool.tensor, slots_B)
    results = pool.bytes_touched + x_BHP.nbytes
    return Comparison("mamba2_step", mamba2.mamba2_step, triton_kernels.mamba2_step, arguments, (pool,), results)


def _delta(
    name: str, twin: Form, kernel: Form, empty: Callable[..., Tensor], slots_B: Tensor, *, num_key_heads: int
) -> Comparison:
    """With as many key heads as heads, decays are per channel."""
    num_rows, heads, dim = len(slots_B), 32, 128
    q_BGK, k_BGK = (empty(num_rows, num_key_heads, dim) for _ in range(2))
    v_BHV = empty(num_rows, heads, dim)
    log_a = empty(num_rows, heads, dim) if num_key_heads == heads else empty(num_rows, heads)
    pool = PoolArgument("delta", empty(NUM_STATE_SLOTS, heads, dim, dim), num_rows)
    arguments = (q_BGK, k_BGK, v_BHV, log_a, empty(num_rows, heads), pool.tensor, slots_B)
    return Comparison(name, twin, kernel, arguments, (pool,), pool.bytes_touched + v_BHV.nbytes)


def _conv(empty: Callable[..., Tensor], slots_B: Tensor) -> Comparison:
    num_rows, channels, taps, dtype = len(slots_B), 4352, 4, torch.bfloat16
    x_BD, weight_DW = empty(num_rows, channels, dtype=dtype), empty(channels, taps, dtype=dtype)
    pool = PoolArgument("conv", empty(NUM_STATE_SLOTS, taps - 1, channels, dtype=dtype), num_rows)
    arguments = (x_BD, weight_DW, empty(channels, dtype=dtype), pool.tensor, slots_B)
    results = pool.bytes_touched + x_BD.nbytes
    return Comparison("conv_step", conv.conv_step, triton_kernels.conv_step, arguments, (pool,), results)


def _attention(empty: Callable[..., Tensor], table: Tensor, rows_B: Tensor) -> Comparison:
    """The new tokens' keys and values are written first, as a step does."""
    (num_rows, context_len), heads, groups, dim, dtype = table.shape, 32, 8, 128, torch.bfloat16
    q_BHD, k_BGD, v_BGD = (empty(num_rows, n, dim, dtype=dtype) for n in (heads, groups, groups))
    pools = [
        PoolArgument(name, empty(NUM_KV_SLOTS, groups, dim, dtype=dtype), num_rows * context_len) for name in ("k", "v")
    ]
    k_pool, v_pool = (pool.tensor for pool in pools)

    def written_first(form: Form) -> Form:
        def step(q_BHD: Tensor, k_BGD: Tensor, v_BGD: Tensor, k_pool: Tensor, v_pool: Tensor, *context: Tensor) -> Any:
            *visible, new_slots_B = context
            k_pool.index_put_((new_slots_B,), k_BGD)
            v_pool.index_put_((new_slots_B,), v_BGD)
            return form(q_BHD, k_pool, v_pool, *visible, context_len, scale=dim**-0.5)

        return step

    arguments = (q_BHD, k_BGD, v_BGD, k_pool, v_pool, table, rows_B, rows_B, rows_B)
    return Comparison(
        "decode_attention",
        written_first(attention.decode_attention),
        written_first(triton_kernels.decode_attention),
        arguments,
        tuple(pools),
        k_BGD.nbytes + v_BGD.nbytes + q_BHD.nbytes,
    )


def _latent_attention(empty: Callable[..., Tensor], table: Tensor, rows_B: Tensor) -> Comparison:
    """The new tokens' latents are written first, as a step does."""
    (num_rows, context_len), heads, dtype = table.shape, 32, torch.bfloat16
    q_nope, q_rope = empty(num_rows, heads, 128, dtype=dtype), empty(num_rows, heads, 64, dtype=dtype)
    latent_BC, w_k, w_v = empty(num_rows, 576, dtype=dtype), *(empty(heads, 128, 512, dtype=dtype) for _ in range(2))
    pool = PoolArgument("latent", empty(NUM_KV_SLOTS, 576, dtype=dtype), num_rows * context_len)

    def written_first(form: Form) -> Form:
        def step(q_nope: Tensor, q_rope: Tensor, latent_BC: Tensor, pool: Tensor, *others: Tensor) -> Any:
            *context, new_slots_B = others
            pool.index_put_((new_slots_B,), latent_BC)
            return form(q_nope, q_rope, pool, *context, context_len, scale=192**-0.5)

        return step

    arguments = (q_nope, q_rope, latent_BC, pool.tensor, w_k, w_v, table, rows_B, rows_B, rows_B)
    twin, kernel = written_first(attention.decode_mla), written_first(triton_kernels.decode_mla)
    return Comparison("decode_mla", twin, kernel, arguments, (pool,), latent_BC.nbytes + q_nope.nbytes)


def _copies(empty: Callable[..., Tensor], slots_B: Tensor) -> Comparison:
    """Windows and states of a few layers, from as many slots to as many others as there are rows."""
    shapes = [((3, 4352), torch.bfloat16), ((48, 64, 128), torch.float32)] * NUM_COPIED_LAYERS
    pools = tuple(
        PoolArgument(f"{number}", empty(NUM_STATE_SLOTS, *shape, dtype=dtype), len(slots_B))
        for number, (shape, dtype) in enumerate(shapes)
    )
    tensors = [pool.tensor for pool in pools]
    chunks = empty(sum(-(-tensor[0].nbytes // 8192) for tensor in tensors), 3, dtype=torch.int64)

    def twin(chunks: Tensor, sources: Tensor, destinations: Tensor, *tensors: Tensor) -> None:
        for tensor in tensors:
            tensor[destinations] = tensor[sources]

    def kernel(chunks: Tensor, sources: Tensor, destinations: Tensor, *tensors: Tensor) -> None:
        triton_kernels.copy_slots(triton_kernels.SlotTable(tensors, chunks), sources, destinations)

    arguments = (chunks, slots_B, slots_B, *tensors)
    name = f"copy_slots, {NUM_COPIED_LAYERS} layers"
    results = sum(pool.bytes_touched for pool in pools)
    return Comparison(name, twin, kernel, arguments, pools, results, is_captured=False)


def _draw(empty: Callable[..., Tensor], keys_B: Tensor) -> Comparison:
    """With every filter, from the vocabulary of Granite 4.0."""
    shares_B = empty(len(keys_B), dtype=torch.float64)
    arguments = (empty(len(keys_B), 100_352), shares_B, shares_B, keys_B, shares_B, keys_B, keys_B, keys_B)

    def from_tensors(form: Form) -> Form:
        return lambda logits_BV, *options: form(logits_BV, draw.DrawInputs(*options))

    twin, kernel = from_tensors(draw.draw_tokens), from_tensors(triton_kernels.draw_tokens)
    return Comparison("draw_tokens", twin, kernel, arguments, (), keys_B.nbytes)


def measure(comparison: Comparison, *, kernels_only: bool) -> dict[str, Any]:
    """One row of the table: per form its launches, bytes moved and allocated, registers and findings."""
    forms = {"kernel": comparison.kernel} if kernels_only else {"twin": comparison.twin, "kernel": comparison.kernel}
    row: dict[str, Any] = {"name": comparison.name, "needed": comparison.needed}
    for name, form in forms.items():
        report = comparison.examine(form)
        row[name] = {
            "refusal": report.refusal,
            "launches": report.num_launches,
            "moved": report.num_read + report.num_written,
            "allocated": report.allocated,
            "registers": [kernel.machine_code.num_registers for kernel in report.kernels],
            "findings": [str(finding) for finding in report.findings],
            "mutated": list(report.mutated),
        }
    return row


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("", "needed MB", "moved MB", "allocated MB", "launches", "registers", "findings")
    for row in rows:
        for form in ("twin", "kernel"):
            if form in row:
                cells = [f"{row[form][key] / 1e6:.2f}" for key in ("moved", "allocated")]
                registers = ", ".join(map(str, row[form]["registers"]))
                findings = row[form]["refusal"] or "; ".join(row[form]["findings"])
                launches = str(row[form]["launches"])
                needed = f"{row['needed'] / 1e6:.2f}"
                table.add_row(f"{row['name']}, {form}", needed, *cells, launches, registers, findings)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument("--kernels-only", action="store_true", help="leave out the PyTorch forms")
    parser.add_argument("--json", action="store_true", help="print one JSON object per operation")
    options = parser.parse_args()
    with pretend_cuda():
        rows = [
            measure(comparison, kernels_only=options.kernels_only)
            for comparison in comparisons(options.rows, options.context_len)
        ]
    if options.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        show(rows)


if __name__ == "__main__":
    main()

"""Every form of single operations: PyTorch's, Inductor's, and the hand-written one that compiled steps run.

    python profiles/bench_ops.py [--batch 1 8 32] [--out profiles/results/bench_ops.json]

Sizes are those of `models/granite-h-350m`, or others of `op_cases.py`. Microseconds of a call, the least of several
rounds over the operands of all depths; bytes that a call has to move per second, and what share that is of reading
memory, measured in the same run. "compiled" is the PyTorch form compiled alone for these very sizes, "twin" the form
that `ops/kernels.py` chooses for compiled steps; there is no row where that is the PyTorch form. On CUDA calls are
enqueued one behind the other, so that launching counts where it takes longer than the kernel. Run it when nothing else
runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from limits import MachineLimits, best_seconds, measure_limits
from measuring import write_results
from op_cases import SHAPES, Maker, OpCase
from peer_rows import Row
from rich.console import Console
from rich.table import Table

from hybrid_runtime.ops.kernels import REFERENCE, Kernels, compiled_kernels

FORMS = ("eager", "compiled", "twin")


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    limits = measure_limits(device, dtype, num_bytes=options.buffer_mib and options.buffer_mib * 2**20)
    kernels = compiled_kernels(device)
    rows = []
    for case in _cases(Maker(SHAPES[options.shape], dtype, device), options.batch):
        for form in options.forms:
            row = measure(case, form, kernels, limits, device)
            if row is not None:
                rows.append(row)
                print(json.dumps(row), flush=True)
    Console().print(_table(rows))
    write_results(options.out, {"rows": rows, "limits": dataclasses.asdict(limits)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="granite", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--buffer-mib", type=int, help="size of the buffers that bandwidth is measured with")
    parser.add_argument("--out", type=Path, help="also write the rows to this JSON file")
    return parser


def _cases(maker: Maker, batches: list[int]) -> Iterator[OpCase]:
    """One by one, so that only one case's operands are in memory."""
    for batch in batches:
        yield from maker.decode_cases(batch)
    yield from maker.prefill_cases()


@torch.no_grad()
def measure(case: OpCase, form: str, kernels: Kernels, limits: MachineLimits, device: torch.device) -> Row | None:
    """A row of figures; None for a twin that is the PyTorch form itself."""
    plain, twin = getattr(REFERENCE, case.operation), getattr(kernels, case.operation)
    if form == "twin" and twin is plain:
        return None
    function, arguments = plain, case.arguments
    if form == "twin":
        function = twin
        if case.operation == "linear":
            packed = kernels.pack([weight for _, weight in arguments])
            arguments = tuple((*each, None, copy) for each, copy in zip(arguments, packed, strict=True))
    elif form == "compiled":
        torch.compiler.reset()  # the number of compilations of a function is limited
        function = torch.compile(plain, fullgraph=True, dynamic=False)

    def call_all() -> None:
        for each in arguments:
            function(*each, **case.options)

    seconds = best_seconds(call_all, device) / len(arguments)
    gb_s = 1e-9 * case.num_bytes / seconds
    return {
        "op": case.name,
        "form": form,
        "rows": case.rows,
        "us": 1e6 * seconds,
        "gb_s": gb_s,
        "share_of_bandwidth": gb_s / limits.read_gb_s,
    }


def _table(rows: list[Row]) -> Table:
    table = Table("operation", "rows", "form", "us", "GB/s", "of reading")
    for row in rows:
        share = f"{row['share_of_bandwidth']:.0%}"
        table.add_row(row["op"], str(row["rows"]), row["form"], f"{row['us']:,.1f}", f"{row['gb_s']:.1f}", share)
    return table


if __name__ == "__main__":
    main()

"""What the three kinds of rollback hold and need at most, measured by a model that verifies and commits.

    python profiles/bench_speculative_memory.py [--nodes 63] [--rows 8] [--out profiles/results/...json]

A recurrent layer of the sizes of Kimi-Linear (KDA), Qwen3-Next (GDN) or Nemotron-H (Mamba-2), with next to no hidden
size, stands at 2 and at 4 depths, so that what grows is records and states. Each case runs in a process of its own: its
memory before and after its records have been allocated and written (resident), and the most it had while a tree was
verified and a path committed (peak), both less what it had before. Bytes of 32 layers and 32 rows are extrapolated: per
layer by the difference of the two depths, rows in proportion; `linear` says how far the arithmetic of the memory plan
agrees with the larger one.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measuring import write_results
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hybrid_runtime.graphs.step_inputs import CommitInputs, StepMemory, VerifyInputs
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.models.rollback import ROLLBACKS
from hybrid_runtime.ops.draft_tree import AcceptedPath, draft_tree
from hybrid_runtime.ops.kernels import compiled_kernels, wait_for_kernels
from hybrid_runtime.walkthrough.rollback_memory import LAYERS, STATE_DTYPE, layer_model, record_plan

DEPTHS = (2, 4)
MANY_LAYERS, MANY_ROWS = 32, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=63, help="of a tree, the root included")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--child", nargs=3, metavar=("LAYER", "ROLLBACK", "DEPTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        layer, rollback, depth = options.child
        print(json.dumps(_measure(layer, rollback, int(depth), options.nodes, options.rows)))
        return
    rows = []
    for layer in tqdm(LAYERS, leave=False):
        for rollback in ROLLBACKS:
            shallow, deep = (_in_process(layer, rollback, depth, options.nodes, options.rows) for depth in DEPTHS)
            rows.append(_row(layer, rollback, shallow, deep, options.nodes, options.rows))
    _print(rows)
    write_results(options.out, {"rows": rows, "num_nodes": options.nodes, "num_rows": options.rows})


def _in_process(layer: str, rollback: str, depth: int, num_nodes: int, num_rows: int) -> dict[str, int]:
    sizes = ["--nodes", str(num_nodes), "--rows", str(num_rows)]
    command = [sys.executable, __file__, *sizes, "--child", layer, rollback, str(depth)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


@torch.no_grad()
def _measure(layer: str, rollback_name: str, depth: int, num_nodes: int, num_rows: int) -> dict[str, int]:
    """Bytes of one process: `resident` and `peak`, over what it had before the records."""
    device, rollback = torch.device("cpu"), ROLLBACKS[rollback_name]
    wait_for_kernels(device, trees=True)
    model = layer_model(layer, device).with_kernels(compiled_kernels(device))
    pools = [Pool(model.state_layers(STATE_DTYPE), num_rows) for _ in range(depth)]
    for pool in pools:
        pool.fill(torch.arange(num_rows + 1), 0.1)
    rows_B = torch.arange(1, num_rows + 1)
    parents_BT = torch.arange(num_nodes).sub(1).clamp(min=0).expand(num_rows, -1).contiguous()
    zeros_BT, zeros_B = torch.zeros_like(parents_BT), torch.zeros_like(rows_B)
    inputs = VerifyInputs(zeros_BT, zeros_BT, zeros_BT, rows_B, zeros_B, 1, rows_B, draft_tree(parents_BT))
    path = AcceptedPath(torch.arange(num_nodes).expand(num_rows, -1), torch.full_like(rows_B, num_nodes))
    before = _resident_bytes()

    plan = record_plan(layer, rollback_name, num_nodes=num_nodes, num_layers=depth, num_rows=num_rows + 1)
    records = plan.allocate(device)
    for record in (record for of_layer in records for record in of_layer.values()):
        record.fill_(0.1)
    resident = _resident_bytes()
    no_table = torch.zeros(1, 1, dtype=torch.int32)
    memories = [StepMemory((), pool.layers, no_table, (own,)) for pool, own in zip(pools, records, strict=True)]
    for memory in memories:
        model.verify_stream(inputs, memory, rollback)
    for memory in memories:
        model.commit(CommitInputs(rows_B, rows_B, rows_B, path), memory, rollback)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"resident": resident - before, "peak": peak - before, "planned": plan.num_bytes}


def _resident_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def _row(
    layer: str, rollback: str, shallow: dict[str, int], deep: dict[str, int], num_nodes: int, num_rows: int
) -> dict[str, Any]:
    def extrapolated(what: str) -> float:
        per_layer = (deep[what] - shallow[what]) / (DEPTHS[1] - DEPTHS[0])
        return (deep[what] + (MANY_LAYERS - DEPTHS[1]) * per_layer) * (MANY_ROWS + 1) / (num_rows + 1)

    many = record_plan(layer, rollback, num_nodes=num_nodes, num_layers=MANY_LAYERS, num_rows=MANY_ROWS + 1)
    return {
        "layer": layer,
        "rollback": rollback,
        "measured": {str(depth): figures for depth, figures in zip(DEPTHS, (shallow, deep), strict=True)},
        "linear": deep["resident"] / deep["planned"],
        "resident_extrapolated": extrapolated("resident"),
        "peak_extrapolated": extrapolated("peak"),
        "resident_planned": many.num_bytes,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "layer",
        "rollback",
        "resident, 4 layers",
        "peak, 4 layers",
        "measured / planned",
        f"resident, {MANY_LAYERS} layers, {MANY_ROWS} rows (extrapolated)",
        "planned",
        "peak (extrapolated)",
        "snapshot's resident over it",
    )
    snapshot = {row["layer"]: row["resident_planned"] for row in rows if row["rollback"] == "snapshot"}
    for row in rows:
        deep = row["measured"][str(DEPTHS[1])]
        sizes = (row["resident_extrapolated"], row["resident_planned"], row["peak_extrapolated"])
        table.add_row(
            row["layer"],
            row["rollback"],
            _mb(deep["resident"]),
            _mb(deep["peak"]),
            f"{row['linear']:.3f}",
            *map(_mb, sizes),
            f"{snapshot[row['layer']] / row['resident_planned']:.1f}",
        )
    Console(width=180).print(table)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


if __name__ == "__main__":
    main()

"""Verify and commit of one recurrent layer on a CPU, by each way to roll back: times, bytes, and what fold gains.

    python profiles/bench_speculative_ops.py [--rows 1 8] [--out profiles/results/bench_speculative_ops.json]

Sizes are those of Kimi-Linear (KDA), Qwen3-Next (GDN) and Nemotron-H (Mamba-2); activations are bfloat16, states
float32. Trees: chains of 3, 7, 15 and 63 nodes, and 63 nodes of 5 steps at topk 4. The longest path is accepted.

- fold: outputs from the committed state alone; the accepted path is folded into it.
- snapshot: every node's state goes to a buffer; the accepted one is copied to the working slot.
- replay: the same in one buffer that all layers share; accepted nodes then step the working slot, one after the other.

Microseconds are medians of several rounds over the pools of so many layers that nothing of a state is left in a cache
from the call before; operands, which a model has just computed, are. Bytes are those of states (each node's once, as it
is written, in a buffer) and of operands and outputs of all nodes; the share of bandwidth is theirs, over what a copy
reaches in the same run. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from limits import MachineLimits, measure_limits
from measuring import median, write_results
from peer_rows import Row
from rich.console import Console
from rich.table import Table
from rollback_cases import SIZES, SMALL_SIZES, Layer, Sizes, chain, deepest_path, make_layer, topk_tree
from torch import Tensor

from hybrid_runtime.ops.cpu_kernels import ensure_built
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree, draft_tree

TREES = {
    "chain of 3": chain(3),
    "chain of 7": chain(7),
    "chain of 15": chain(15),
    "63 of topk 4": topk_tree(63, topk=4, num_steps=5),
    "chain of 63": chain(63),
}
QUICK_TREES = {"chain of 3": chain(3), "7 of topk 2": topk_tree(7, topk=2, num_steps=2)}
COLD_BYTES = 2**27  # of states that are touched before the first ones again: several times a last-level cache


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ensure_built()
    limits = measure_limits(torch.device("cpu"), torch.bfloat16, num_bytes=2**20 if options.quick else None)
    rows = []
    for case in _cases(options):
        for rollback in Case.ROLLBACKS:
            rows.append(measure(case, rollback, limits, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
    ratios = compare(rows)
    Console().print(_table(rows, ratios))
    write_results(options.out, {"rows": rows, "fold_against_snapshot": ratios, "limits": dataclasses.asdict(limits)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--trees", nargs="+", default=list(TREES), choices=list(TREES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="small states and trees: shows that it runs")
    parser.add_argument("--out", type=Path, help="also write the rows to this JSON file")
    return parser


class Case:
    """One layer and tree, on the states of several layers, which are called in turn."""

    ROLLBACKS = ("fold", "snapshot", "replay")

    def __init__(self, op: str, tree_name: str, parents: Sequence[int], num_rows: int, sizes: Sizes, cold_bytes: int):
        self.op, self.tree_name, self.num_rows = op, tree_name, num_rows
        self.layer: Layer = make_layer(op, sizes, num_rows, len(parents))
        self.tree: DraftTree = draft_tree(torch.tensor(parents).repeat(num_rows, 1))
        self.path: AcceptedPath = deepest_path(parents, num_rows)
        self.slots_B = torch.arange(num_rows) + 1
        self.states_bytes = 4 * num_rows * math.prod(sizes.state_shape)
        self._cold_bytes = cold_bytes
        num_layers = self._num_calls(self.states_bytes)
        self.pools = [torch.randn(num_rows + 1, *sizes.state_shape) for _ in range(num_layers)]
        num_buffers = self._num_calls(self.states_bytes * (1 + len(parents)))
        self._buffers = [torch.ones(num_rows, len(parents), *sizes.state_shape) for _ in range(num_buffers)]

    def _num_calls(self, bytes_per_call: int) -> int:
        return max(2, math.ceil(self._cold_bytes / bytes_per_call))

    @property
    def num_accepted(self) -> int:
        return int(self.path.num_nodes_B[0])

    def calls(self, rollback: str) -> Iterator[tuple[Callable[[], Tensor | None], Callable[[Tensor | None], None]]]:
        """Verify, and commit with what verify gave, layer by layer."""
        if rollback == "fold":
            for pool in self.pools:
                yield (
                    lambda pool=pool: self.layer.verify(pool, self.slots_B, self.tree),
                    lambda u, pool=pool: self.layer.fold(pool, self.slots_B, u, self.path),
                )
            return
        commit = self._scatter if rollback == "snapshot" else self._replay
        for pool, own in zip(self.pools, self._buffers, strict=False):
            buffer = own if rollback == "snapshot" else self._buffers[0]
            yield (
                lambda pool=pool, buffer=buffer: self.layer.write_states(pool, self.slots_B, self.tree, buffer),
                lambda _, pool=pool, buffer=buffer: commit(pool, buffer),
            )

    def _scatter(self, pool: Tensor, buffer: Tensor) -> None:
        """Row by row: a gather of all accepted states would make a copy of them first."""
        last = int(self.path.nodes_BT[0, self.num_accepted - 1])
        for row in range(self.num_rows):
            pool[row + 1].copy_(buffer[row, last])

    def _replay(self, pool: Tensor, buffer: Tensor) -> None:
        for place in range(self.num_accepted):
            self.layer.step(pool, self.slots_B, self.path.nodes_BT[:, place])

    def state_bytes(self, rollback: str) -> tuple[int, int]:
        """Of verify and of commit."""
        num_nodes = self.tree.parents_BT.shape[1]
        of_verify = self.states_bytes * (1 if rollback == "fold" else 1 + num_nodes)
        return of_verify, 2 * self.states_bytes * (self.num_accepted if rollback == "replay" else 1)

    def operand_bytes(self) -> int:
        """Of all nodes, and of their outputs, which have the size of the inputs x or v."""
        inputs = self.layer.nodes[0 if self.op == "mamba2" else 2]
        return sum(x.nbytes for x in self.layer.nodes) + inputs.nbytes


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """One by one, so that only one case's states are in memory."""
    sizes, trees = (
        (SMALL_SIZES, QUICK_TREES) if options.quick else (SIZES, {name: TREES[name] for name in options.trees})
    )
    for op in options.ops:
        for name, parents in trees.items():
            for num_rows in options.rows:
                yield Case(op, name, parents, num_rows, sizes[op], 0 if options.quick else COLD_BYTES)


@torch.no_grad()
def measure(case: Case, rollback: str, limits: MachineLimits, num_rounds: int) -> Row:
    """Microseconds of a layer."""
    calls = list(case.calls(rollback))
    given = [verify() for verify, _ in calls]

    def seconds_of(functions: list[Callable[[], object]]) -> float:
        start = time.perf_counter()
        for function in functions:
            function()
        return (time.perf_counter() - start) / len(functions)

    verifies = [verify for verify, _ in calls]
    commits = [lambda commit=commit, u=u: commit(u) for (_, commit), u in zip(calls, given, strict=True)]
    verify_s, commit_s = (median(lambda of=of: seconds_of(of), num_rounds) for of in (verifies, commits))
    verify_bytes, commit_bytes = case.state_bytes(rollback)
    total = verify_bytes + commit_bytes + case.operand_bytes()
    return {
        "op": case.op,
        "tree": case.tree_name,
        "rows": case.num_rows,
        "accepted": case.num_accepted,
        "rollback": rollback,
        "verify_us": 1e6 * verify_s,
        "commit_us": 1e6 * commit_s,
        "verify_state_bytes": verify_bytes,
        "commit_state_bytes": commit_bytes,
        "total_bytes": total,
        "share_of_bandwidth": 1e-9 * total / (verify_s + commit_s) / limits.copy_gb_s,
    }


def compare(rows: Sequence[Row]) -> list[Row]:
    """How many times faster verify and commit are by fold than by snapshot, for every case."""
    seconds = {}
    for row in rows:
        seconds[row["op"], row["tree"], row["rows"], row["rollback"]] = row["verify_us"] + row["commit_us"]
    return [
        {"op": op, "tree": tree, "rows": num_rows, "times": seconds[op, tree, num_rows, "snapshot"] / fold}
        for (op, tree, num_rows, rollback), fold in seconds.items()
        if rollback == "fold"
    ]


def _table(rows: Sequence[Row], ratios: Sequence[Row]) -> Table:
    times = {(ratio["op"], ratio["tree"], ratio["rows"]): ratio["times"] for ratio in ratios}
    table = Table("op", "tree", "rows", "rollback", "verify us", "commit us", "MB", "of copying", "fold faster")
    for row in rows:
        ratio = f"{times[row['op'], row['tree'], row['rows']]:.1f}x" if row["rollback"] == "snapshot" else ""
        table.add_row(
            row["op"],
            row["tree"],
            str(row["rows"]),
            row["rollback"],
            f"{row['verify_us']:,.0f}",
            f"{row['commit_us']:,.0f}",
            f"{1e-6 * row['total_bytes']:,.1f}",
            f"{row['share_of_bandwidth']:.0%}",
            ratio,
        )
    return table


if __name__ == "__main__":
    main()

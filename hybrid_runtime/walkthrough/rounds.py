"""The draft trees of a speculative step as text: tokens, KV slots, and which nodes were accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hybrid_runtime import HybridRuntime, RequestOutput
from hybrid_runtime.engine.launching import FlyingStep, StepLauncher
from hybrid_runtime.engine.prepared import PreparedStep
from hybrid_runtime.engine.verify_batch import PreparedVerify
from hybrid_runtime.inspection.labels import EdgeLabels
from hybrid_runtime.scheduling.request import Request


def show_step(rt: HybridRuntime) -> list[RequestOutput]:
    """Makes one step, prints each draft that it verified and what became of it, and returns what the step brought.

    A node's children follow it, indented; its number is its place in the forward.
    """
    engine = rt._engine
    launcher = engine.launcher = _Watched(engine.launcher)
    try:
        outputs = rt.step()
    finally:
        engine.launcher = launcher.launcher
    label = EdgeLabels(rt.tokenizer)
    if not launcher.verifies:
        print("no draft was verified")
    for verify in launcher.verifies:
        for place, request in enumerate(verify.requests):
            print("\n".join(line.rstrip() for line in _tree_lines(verify, place, request, label)))
    return outputs


@dataclass
class _Watched:
    """Hands steps on to a launcher, and keeps their verifies."""

    launcher: StepLauncher
    verifies: list[PreparedVerify] = field(default_factory=list)

    def launch(self, prepared: PreparedStep) -> FlyingStep:
        if prepared.verify is not None:
            self.verifies.append(prepared.verify)
        return self.launcher.launch(prepared)

    def finish(self) -> None:
        self.launcher.finish()

    def discard(self) -> None:
        self.launcher.discard()

    def close(self) -> None:
        self.launcher.close()


def _tree_lines(verify: PreparedVerify, place: int, request: Request, label: EdgeLabels) -> Iterator[str]:
    """A line per node, children behind their parents and indented."""
    batch = verify.batch
    num_nodes, committed = int(batch.num_nodes_B[place]), int(batch.committed_lens_B[place])
    tokens, parents = batch.token_ids_BT[place, :num_nodes], batch.parents_BT[place, :num_nodes]
    accepted = _accepted(tokens.tolist(), parents.tolist(), request.tokens[committed:].tolist())
    yield f"request {request.request_id}, {committed} tokens computed: {num_nodes} nodes, {len(accepted)} accepted"
    rows = [("node", "parent", "KV slot", "", "token")]
    for node in _depth_first(parents.tolist()):
        verdict = "accepted" if node in accepted else ""
        parent = str(parents[node]) if node else "-"
        text = "  " * int(batch.depths_BT[place, node]) + label(np.array([tokens[node]], dtype=np.int32))
        rows.append((str(node), parent, str(batch.kv_slots_BT[place, node]), verdict, text))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    last = label(np.array([request.tokens.last], dtype=np.int32))
    yield f"  behind node {accepted[-1]} the model says {last}: the next root"


def _accepted(tokens: list[int], parents: list[int], sequence: list[int]) -> list[int]:
    """The nodes that are in the request's tokens now. `sequence`: these from the root on; the last is no node."""
    path = [0]
    for token in sequence[1:-1]:
        path.append(next(n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == token))
    return path


def _depth_first(parents: list[int]) -> Iterator[int]:
    def visit(node: int) -> Iterator[int]:
        yield node
        for child in range(node + 1, len(parents)):
            if parents[child] == node:
                yield from visit(child)

    yield from visit(0)

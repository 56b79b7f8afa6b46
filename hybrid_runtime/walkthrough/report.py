"""Who owns which slot, as text: both pools, the request table, the tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hybrid_runtime import HybridRuntime
from hybrid_runtime.cache.node import Node
from hybrid_runtime.engine.commits import Commits
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.inspection.labels import EdgeLabels
from hybrid_runtime.scheduling.request import Request

FREE = "free"
TREE = "tree"


def show(rt: HybridRuntime) -> None:
    """Prints what every slot of both pools is used for now. Changes nothing; meant for pools of a few dozen slots."""
    print("\n".join(line.rstrip() for line in report_lines(rt)))


def report_lines(rt: HybridRuntime) -> Iterator[str]:
    """The lines that `show` prints."""
    memory, running = rt._engine.memory, rt._engine.scheduler.running
    num_kv, num_states = memory.supply.kv.num_slots, memory.supply.states.num_slots
    yield f"KV slots     {pool_line(kv_owners(memory, running), num_kv)}"
    yield f"state slots  {pool_line(state_owners(memory, running), num_states)}"
    yield ""
    yield "request table" if running else "request table: no request runs"
    for request in running:
        yield from _request_lines(memory, request, rt._engine.runner.commits)
    yield ""
    if not memory.cache.num_nodes:
        yield "tree: empty"
        return
    yield "tree"
    yield from _tree_lines(memory.cache.root, EdgeLabels(rt.tokenizer))


def kv_owners(memory: EngineMemory, running: Sequence[Request]) -> dict[int, str]:
    """Who owns each KV slot."""
    owners = dict.fromkeys(memory.supply.kv.free_slots().tolist(), FREE)
    owners |= dict.fromkeys(memory.cache.owned_kv_slots().tolist(), TREE)
    for request in running:
        residence = request.resident
        own = memory.table.slots[residence.row, residence.protected_length : residence.num_kv_slots]
        owners |= dict.fromkeys(own.tolist(), _name(request))
    return owners


def state_owners(memory: EngineMemory, running: Sequence[Request]) -> dict[int, str]:
    """Who owns each state slot."""
    owners = dict.fromkeys(memory.supply.states.free_slots().tolist(), FREE)
    owners |= dict.fromkeys(memory.cache.owned_state_slots().tolist(), TREE)
    for request in running:
        owners |= dict.fromkeys(request.resident.state_slots, _name(request))
    return owners


def pool_line(owners: dict[int, str], num_slots: int) -> str:
    """The owners of slots 1, 2, ...; neighbours of one owner are written as a range."""
    parts: list[tuple[str, list[int]]] = []
    for slot in range(1, num_slots + 1):
        if not parts or parts[-1][0] != owners[slot]:
            parts.append((owners[slot], []))
        parts[-1][1].append(slot)
    return ", ".join(f"{slot_ranges(slots)} {owner}" for owner, slots in parts)


def slot_ranges(slots: Iterable[int]) -> str:
    """`3-5 9` for 3, 4, 5, 9, in the order given."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][-1] + 1 == slot:
            runs[-1][1:] = [slot]
        else:
            runs.append([slot])
    return " ".join("-".join(map(str, run)) for run in runs)


def _name(request: Request) -> str:
    return f"request {request.request_id}"


def _request_lines(memory: EngineMemory, request: Request, commits: Commits) -> Iterator[str]:
    residence = request.resident
    row = memory.table.slots[residence.row, : residence.num_kv_slots].tolist()
    tracked, num_computed = request.tracked, request.num_computed_tokens
    shared, own = row[: residence.protected_length], row[residence.protected_length :]
    num_pending = commits.num_pending(residence.row)
    yield f"  row {residence.row}: {_name(request)}, {num_computed} of {request.num_tokens} tokens computed"
    slots = [" ".join(map(str, part)) for part in (shared, own)]
    yield f"    KV slots      {' | '.join(slots)}"
    pending = f"; {num_pending} more to be replayed" if num_pending else ""
    yield f"    working slot  {residence.working_slot}, the state after {num_computed - num_pending} tokens{pending}"
    if tracked is not None:
        is_due = tracked.length > num_computed - num_pending
        pending = "; to be replayed" if is_due else ""
        yield f"    track slot    {tracked.state_slot}, the state after {tracked.length} tokens{pending}"


def _tree_lines(root: Node, label: EdgeLabels) -> Iterator[str]:
    """A line per node. What follows a node without a fork is not indented, so that a path reads straight down."""
    rows = [("ends at", "KV slots", "state", "locks", "tokens")]

    def visit(node: Node, indent: str) -> None:
        state = "-" if node.state_slot is None else f"slot {node.state_slot}, {node.origin}"
        kv_slots = slot_ranges(node.kv_slots.tolist())
        rows.append((str(node.length), kv_slots, state, str(node.kv_lock), indent + label(node.key)))
        for child in node.children.values():
            visit(child, indent + "  " * (len(node.children) > 1))

    for child in root.children.values():
        visit(child, "")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))

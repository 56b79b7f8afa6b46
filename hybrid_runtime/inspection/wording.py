"""The words and number formats that both outputs share."""

from __future__ import annotations

from hybrid_runtime.inspection.picture import Branch, Edge, Totals

_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))
_UNITS = ((1_000_000, "M"), (1_000, "k"))


def age_text(seconds: float) -> str:
    """How long ago, in the largest unit that fits: `now`, `12s`, `3m`, `5h`, `2d`."""
    for size, unit in _AGES:
        if seconds >= size:
            return f"{int(seconds / size)}{unit}"
    return "now"


def compact(number: int) -> str:
    """At most five characters below a billion: `9999`, `12.3k`, `4.5M`."""
    if number < 10_000:
        return str(number)
    for size, unit in _UNITS:
        if number >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    raise AssertionError(number)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def contents_text(totals: Totals) -> str:
    """What a set of nodes holds: `312 nodes, 40,210 tokens, 298 states`."""
    return ", ".join(
        [
            counted(totals.num_nodes, "node"),
            counted(totals.num_tokens, "token"),
            counted(totals.num_states, "state"),
        ]
    )


def header_text(totals: Totals) -> str:
    if not totals.num_nodes:
        return "empty"
    parts = [
        f"{contents_text(totals)}, {counted(totals.num_tombstones, 'tombstone')}",
        counted(totals.num_hits, "hit"),
        f"locked: {contents_text(locked(totals))}" if totals.num_locked_nodes else "nothing locked",
    ]
    return "; ".join(parts)


def locked(totals: Totals) -> Totals:
    """Only what is under a lock."""
    return Totals(totals.num_locked_nodes, totals.num_locked_tokens, totals.num_locked_states)


def left_out_text(branch: Branch) -> str:
    """`312 more branches: 400 nodes, 40,210 tokens, 298 states`."""
    num_branches, totals = branch.left_out
    return f"{counted(num_branches, 'more branch', 'more branches')}: {contents_text(totals)}"


def state_text(edge: Edge, state_mark: str, tombstone_mark: str) -> str:
    """`● 17 tail`, or `○`, or `○ x3` for a chain of tombstones."""
    if edge.state is not None:
        return f"{state_mark} {edge.state.slot} {edge.state.origin}"
    return tombstone_mark if edge.num_nodes == 1 else f"{tombstone_mark} x{edge.num_nodes}"


def locks_text(edge: Edge) -> str:
    """`2/1`: two locks on the KV, one of them on the state as well; empty without a lock."""
    if edge.num_kv_locks == 0:
        return ""
    return f"{edge.num_kv_locks}/{edge.state.num_locks if edge.state else 0}"


def per_subtree_text(totals: Totals) -> str:
    return f"{compact(totals.num_tokens)}/{compact(totals.num_states)}"


def below_text(edge: Edge) -> str:
    """Tokens and states of the subtree, where there is one."""
    return "" if edge.below == edge.own else per_subtree_text(edge.below)

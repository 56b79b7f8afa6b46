"""Where a request leaves checkpoints: which lengths, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybrid_runtime.config import DEFAULT_MIN_SAVING

# Where several reasons meet at one length the first names the checkpoint; where slots are short it is served first.
ORIGINS = ("hint", "tail", "junction", "interval", "track", "final")


@dataclass(frozen=True)
class CheckpointPolicy:
    """The options of checkpoint placement; None turns a kind off.

    A junction is only worth a state if it saves the next visitor `min_saving` tokens. `num_track_slots` is the
    number of state slots that a request rotates its periodic checkpoints through: two where one may still be read
    while the next is written.
    """

    min_saving: int = DEFAULT_MIN_SAVING
    checkpoint_interval: int | None = None
    track_interval: int | None = None
    num_track_slots: int = 1


def due_in_prompt(
    policy: CheckpointPolicy, *, prompt_len: int, hints: Iterable[int], state_length: int, kv_length: int
) -> dict[int, str]:
    """Lengths past `state_length` at which a request that resumes there is to leave checkpoints, with their origins.

    `hints` are the lengths its user asks for, `kv_length` is how far the tree's keys agree with its tokens.
    """
    tail = prompt_len - 1
    due: dict[int, str] = {}
    if policy.checkpoint_interval is not None:
        due.update(dict.fromkeys(range(policy.checkpoint_interval, prompt_len, policy.checkpoint_interval), "interval"))
    if kv_length - state_length >= policy.min_saving and tail - kv_length >= policy.min_saving:
        due[kv_length] = "junction"
    due[tail] = "tail"
    due.update(dict.fromkeys(hints, "hint"))
    return {length: due[length] for length in sorted(due) if state_length < length <= prompt_len}


def due_in_span(due: Mapping[int, str], start: int, stop: int) -> list[tuple[int, str]]:
    """Those of the due lengths that computing tokens `[start, stop)` passes, the most important first."""
    passed = [(length, origin) for length, origin in due.items() if start < length <= stop]
    return sorted(passed, key=lambda item: (ORIGINS.index(item[1]), item[0]))


def due_after_decode(policy: CheckpointPolicy, due: Mapping[int, str], *, prompt_len: int, length: int) -> str | None:
    """The origin of the checkpoint that is due when a decode row has computed `length` tokens; None: none is."""
    if length in due:
        return due[length]
    if policy.track_interval is not None and length > prompt_len and length % policy.track_interval == 0:
        return "track"
    return None

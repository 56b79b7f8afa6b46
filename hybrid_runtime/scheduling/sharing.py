"""Sharing inside a batch: a request whose next tokens another one is just computing waits for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.scheduling.request import Following, Request, RequestStatus


def still_follows(request: Request) -> bool:
    """Whether what `request` waits for is yet to come: its leader runs and has not landed beyond the length."""
    following = request.following
    return (
        following is not None
        and following.leader.status is RequestStatus.RUNNING
        and following.leader.num_landed_tokens < following.length
        and following.length in following.leader.due_checkpoints
    )


def find_leader(
    request: Request, prefilling: Iterable[Request], *, state_length: int, min_saving: int
) -> Following | None:
    """Which of the requests that are prefilling can leave the deepest state that `request` could resume from, or None.

    It must save at least `min_saving` tokens over the `state_length` that are cached already; one token is enough
    between samples of one prompt. What a step in flight computes cannot be cut any more: there only the checkpoints
    count that are due anyway. Cost: O(tokens compared).
    """
    best: Following | None = None
    for leader in prefilling:
        saving = 1 if leader.request_id == request.request_id else min_saving
        least = max(leader.num_landed_tokens + 1, state_length + saving, best.length + 1 if best else 0)
        limit = min(request.num_tokens - 1, leader.num_tokens)
        if limit < least or not np.array_equal(request.tokens[:least], leader.tokens[:least]):
            continue
        length = shared_length(request.tokens[:limit], leader.tokens[:limit])
        if length <= leader.num_computed_tokens:
            length = max((due for due in leader.due_checkpoints if due <= length), default=0)
        if length >= least:
            best = Following(leader, length)
    return best


def shared_length(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens two arrays of one length have in common."""
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else len(a)

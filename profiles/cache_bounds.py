"""What no eviction policy can pass, or could reach if it knew the future."""

from __future__ import annotations

from collections.abc import Sequence

from cache_workloads import BLOCK_SIZE, Request


def matched_blocks(requests: Sequence[Request]) -> list[int]:
    """Of each request, how many blocks an earlier one had, too."""
    seen: set[int] = set()
    matched = []
    for request in requests:
        new = next((place for place, block in enumerate(request.reusable) if block not in seen), len(request.reusable))
        matched.append(new)
        seen.update(request.reusable)
    return matched


def bound_without_eviction(requests: Sequence[Request]) -> float:
    """Share of tokens that are cached with a state at every block of every prompt, for ever: no one can do better."""
    return BLOCK_SIZE * sum(matched_blocks(requests)) / sum(request.num_tokens for request in requests)


def clairvoyant(requests: Sequence[Request], num_state_slots: int) -> float:
    """Share of tokens that are cached with `num_state_slots` states by one who knows all requests.

    Every later request is going to want the state at the last block that it has in common with an earlier prompt. The
    last of the prompts before it that have this block leaves that state, and no other one. Whenever there are too many,
    the one goes that saves the fewest tokens per request that it has still to wait. A request whose state went
    resumes from the deepest one that there is on its path.

    A heuristic with knowledge of the future, not the optimum, which is at least this and at most
    `bound_without_eviction`. (To drop what is wanted last, as Belady does, is worse here: states differ in tokens.)
    """
    matched = matched_blocks(requests)
    wanted = _wanted_next(requests, matched)
    kept: dict[int, int] = {}  # block at whose end a state is kept, and the place of the request it is kept for
    num_cached = 0
    for place, request in enumerate(requests):
        path = request.reusable[: matched[place]]
        num_cached += next((length for length in range(len(path), 0, -1) if path[length - 1] in kept), 0)
        if path and kept.get(path[-1]) == place:
            del kept[path[-1]]
        for later in wanted[place]:
            kept[requests[later].blocks[matched[later] - 1]] = later
        while len(kept) > num_state_slots:
            del kept[min(kept, key=lambda block: matched[kept[block]] / (kept[block] - place))]
    return BLOCK_SIZE * num_cached / sum(request.num_tokens for request in requests)


def _wanted_next(requests: Sequence[Request], matched: Sequence[int]) -> list[list[int]]:
    """For each request, the later ones that want a state from it."""
    wanted: list[list[int]] = [[] for _ in requests]
    last_with: dict[int, int] = {}
    for place, request in enumerate(requests):
        if matched[place]:
            wanted[last_with[request.blocks[matched[place] - 1]]].append(place)
        last_with.update(dict.fromkeys(request.reusable, place))
    return wanted

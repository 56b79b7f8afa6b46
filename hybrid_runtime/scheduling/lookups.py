"""What looking for a prefix brought: for one request, and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hybrid_runtime.cache.ghosts import GhostIndex
from hybrid_runtime.cache.results import PrefixMatch
from hybrid_runtime.scheduling.request import PrefixHit, Request


@dataclass
class LookupCounts:
    """What looking for prefixes has brought so far. Each row counts once, at its first admission; warm-ups do not."""

    num_requests: int = 0
    num_hits: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    hits_by_origin: Counter[str] = field(default_factory=Counter)
    misses_by_reason: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request, hit: PrefixHit) -> None:
        self.num_requests += 1
        if hit.checkpoint_origin is not None:
            self.num_hits += 1
            self.hits_by_origin[hit.checkpoint_origin] += 1
        if hit.cache_miss_reason is not None:
            self.misses_by_reason[hit.cache_miss_reason] += 1
        self.num_prompt_tokens += request.tokens.prompt_len
        self.num_cached_tokens += hit.num_cached_tokens


def describe_lookup(request: Request, found: PrefixMatch, match: PrefixMatch, ghosts: GhostIndex | None) -> PrefixHit:
    """`found` is what the cache has for a request, `match` what it makes use of.

    `ghosts` remembers what was evicted; None: the prefix cache is off.
    """
    return PrefixHit(
        num_cached_tokens=match.state_length,
        num_kv_matched_tokens=found.kv_length,
        checkpoint_origin=match.origin,
        cache_miss_reason=None if match.state_length else _miss_reason(request, found, ghosts),
    )


def _miss_reason(request: Request, found: PrefixMatch, ghosts: GhostIndex | None) -> str:
    if ghosts is None:
        return "disabled"
    if request.wants_prompt_logprobs:
        return "prompt_logprobs"
    if request.tail_position == 0:
        return "too_short"
    if found.state_length:
        return "no_room"
    evicted = ghosts.longest(request.tokens[:-1])
    if evicted:
        return "state_evicted" if found.kv_length >= evicted else "kv_evicted"
    return "no_state_on_path" if found.kv_length else "cold"

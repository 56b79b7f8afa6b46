"""What a caller gets back: the outputs of requests, and the counters of the runtime. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position, of the distribution before any sampling option was applied."""

    logprob: float
    rank: int  # 1: the most likely token; equal logprobs share the better rank
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # token id -> Logprob: the token that is there, and the most likely ones


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request. In a delta, `text`, `token_ids` and `logprobs` hold what is new."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None  # None without `logprobs`
    logprobs: list[TokenLogprobs] | None = None  # one entry per token of `token_ids`
    finish_reason: FinishReason | None = None  # None while the sample goes on
    stop_reason: int | str | None = None  # the stop token id or stop string, or an error's message

    @property
    def finished(self) -> bool:
        """Whether no more tokens follow."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_draft_rounds: int = 0  # verifies of a draft
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones; as in SpeculationStats
    num_lost_states: int = 0  # times that states behind a verify could not be written; from 3 on it decodes plainly

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until the first step that worked on the request."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the first token."""
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token until the last."""
        return _difference(self.finished_time, self.first_token_time)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival until the end."""
        return _difference(self.finished_time, self.arrival_time)


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request, or (streaming) what is new of it.

    `checkpoint_origin` is "tail" (end of a prompt), "junction" (where another prompt parted ways), "hint" (a position
    that a user, `chat` or `warmup` named), "interval" (inside a long prompt), "track" (inside an output) or "final"
    (end of a request). `cache_miss_reason` is "cold" (nothing that helps was ever there), "no_state_on_path" (tokens
    match, no checkpoint was ever among them), "state_evicted" (one was, and the tokens still match), "kv_evicted" (one
    was, and so were the tokens), "no_room" (one is there, but the request only fitted in without it), "too_short" (a
    prompt of one token), "prompt_logprobs" (every token must be computed) or "disabled". Both are about the first
    sample.
    """

    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[TokenLogprobs | None] | None  # one entry per prompt token; the first is None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose compute was skipped
    num_kv_matched_tokens: int  # prompt tokens found in the cache, computed again or not; 0 if it was not looked at
    checkpoint_origin: str | None  # why the state that was resumed from had been kept; None without a hit
    cache_miss_reason: str | None  # why nothing was skipped; None with a hit
    metrics: RequestMetrics


@dataclass(frozen=True)
class PoolStats:
    """Slots of one pool: `free + cached + in_use == total`; the null slot is not counted."""

    total: int
    free: int
    cached: int  # owned by the prefix cache
    in_use: int  # owned by requests

    @property
    def usage(self) -> float:
        """Share of the slots that requests own or that the cache holds."""
        return 1 - self.free / self.total


@dataclass(frozen=True)
class CacheStats:
    """What the prefix cache did since the start."""

    num_requests: int = 0  # rows that looked for a prefix: each sample of a request is one
    num_hits: int = 0  # of which resumed from a checkpoint
    num_prompt_tokens: int = 0  # of the requests that looked
    num_cached_tokens: int = 0  # of which skipped
    num_nodes: int = 0  # now in the tree
    num_checkpoints: int = 0  # now in the tree
    hits_by_origin: Mapping[str, int] = field(default_factory=dict)  # num_hits, by the origin of the checkpoint
    misses_by_reason: Mapping[str, int] = field(default_factory=dict)  # the other requests, by cache_miss_reason
    num_kept_checkpoints: Mapping[str, int] = field(default_factory=dict)  # per origin
    num_skipped_checkpoints: Mapping[str, int] = field(default_factory=dict)  # due, but no slot was free; per origin
    num_evicted_tokens: int = 0
    num_evicted_states: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were skipped; 0 before the first request."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclass(frozen=True)
class HostCacheStats:
    """What went to the second tier of the prefix cache, in host memory or in a file, and what came back."""

    total_bytes: int
    used_bytes: int
    num_checkpoints: int  # now there
    num_saved_checkpoints: int  # since the start, as all below
    num_saved_tokens: int  # whose KV was copied; what the tier had of a path already is not copied again
    num_skipped_checkpoints: int  # evicted, but the tier had no room
    num_restored_checkpoints: int
    num_restored_tokens: int  # whose KV was copied back
    num_failures: int  # reads and writes that the operating system refused


@dataclass(frozen=True)
class PrefixCacheFile:
    """What was saved to a file of the prefix cache, or loaded from one."""

    num_checkpoints: int
    num_tokens: int  # whose KV is in the file, or was loaded: shared prefixes count once
    num_bytes: int  # of the file, or of what was loaded


@dataclass(frozen=True)
class SchedulerStats:
    """The queues now, and what was run since the start."""

    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0  # computed, not skipped
    num_decode_tokens: int = 0  # computed, the wasted ones included; of verifies what they delivered
    num_wasted_rows: int = 0  # decode rows of requests that, with overlap, turned out to have ended one step before


@dataclass(frozen=True)
class SpeculationStats:
    """Of all verifies since the start.

    Each row delivers one token more than it accepts. What the model agreed to behind the end of a request was never
    delivered and does not count; nor does the token that ends it, since that one is never computed.
    """

    num_verified_rows: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones
    num_failed_drafts: int = 0  # steps whose drafter raised or answered nonsense
    num_failed_commits: int = 0  # verifies behind which states could not be written, so that they are computed anew
    record_bytes: int = 0  # of what verifies note down, part of the memory plan


@dataclass(frozen=True)
class RuntimeStats:
    """A snapshot of the whole runtime."""

    kv: PoolStats
    state: PoolStats
    cache: CacheStats
    scheduler: SchedulerStats
    host_cache: HostCacheStats | None = None  # None: there is no second tier
    speculation: SpeculationStats | None = None  # None: the runtime does not speculate


def token_logprobs(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    decode: Callable[[int], str] | None = None,
) -> TokenLogprobs:
    """The entry of one position: its token first, then the most likely tokens in their order.

    `top_ids` and `top_logprobs` are sorted, most likely first, and may hold the token as well.
    """
    entry = {token_id: Logprob(logprob, rank, decode(token_id) if decode else None)}
    top_rank, previous = 0, None
    for place, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        top_rank = top_rank if top_logprob == previous else place
        previous = top_logprob
        if top_id != token_id:
            entry[top_id] = Logprob(top_logprob, top_rank, decode(top_id) if decode else None)
    return entry

"""One scheduled row: a sample of a user's request, its tokens, and the slots it owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.cache.receipt import LockReceipt
from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.memory.slots import StateSlot
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.speculative.adaptive import DraftBudget

MAX_LOST_STATES = 3
"""After so many losses a request decodes plainly: each has it compute again what the cache does not hold of it."""


class RequestStatus(Enum):
    WAITING = "waiting"  # owns nothing
    RUNNING = "running"  # owns a Residence
    LEAVING = "leaving"  # has ended for its user; owns a Residence until the step in flight that works on it has landed
    FINISHED = "finished"  # owns nothing


class TokenBuffer:
    """Prompt and output tokens of one request in one int32 array that grows in place."""

    def __init__(self, prompt_token_ids: NDArray[np.int32], max_len: int) -> None:
        self.prompt_len = len(prompt_token_ids)
        self._array = np.empty(max(max_len, self.prompt_len), dtype=np.int32)
        self._array[: self.prompt_len] = prompt_token_ids
        self._len = self.prompt_len

    def __len__(self) -> int:
        return self._len

    def append(self, token_id: int) -> None:
        self._array[self._len] = token_id
        self._len += 1

    def truncate(self, num_output_tokens: int) -> None:
        """Forgets output tokens behind the first `num_output_tokens`."""
        assert self.prompt_len + num_output_tokens <= self._len
        self._len = self.prompt_len + num_output_tokens

    def __getitem__(self, part: slice) -> NDArray[np.int32]:
        """A view of the tokens there are; no copy."""
        return self._array[: self._len][part]

    @property
    def max_len(self) -> int:
        """Tokens that there is room for: the request ends when it has as many."""
        return len(self._array)

    @property
    def last(self) -> int:
        return int(self._array[self._len - 1])

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self._array[: self.prompt_len]

    @property
    def output(self) -> NDArray[np.int32]:
        return self._array[self.prompt_len : self._len]


@dataclass
class Residence:
    """What a running request owns in the pools, from admission until it ends or is preempted.

    Row `row` of the request table names `num_kv_slots` KV slots: the first `protected_length` are the tree's, kept by
    `receipt`, the others the request's own. `working_slot` is its state slot. `tracks` are its periodic checkpoints,
    the oldest first, each in a slot of its own: a checkpoint is in its slot when the step that computes its length
    has landed.
    """

    row: int
    working_slot: StateSlot
    receipt: LockReceipt
    protected_length: int
    num_kv_slots: int
    tracks: list[Checkpoint] = field(default_factory=list)

    @property
    def track_slots(self) -> list[StateSlot]:
        return [checkpoint.state_slot for checkpoint in self.tracks]

    @property
    def state_slots(self) -> list[StateSlot]:
        """All state slots that the request owns."""
        return [self.working_slot, *self.track_slots]


@dataclass(frozen=True)
class PrefixHit:
    """What the prefix cache had for a request when it was first admitted."""

    num_cached_tokens: int
    num_kv_matched_tokens: int
    checkpoint_origin: str | None
    cache_miss_reason: str | None


@dataclass(frozen=True, eq=False)
class Following:
    """What a waiting request waits for: the checkpoint at `length` that `leader` is about to leave."""

    leader: Request
    length: int


@dataclass(eq=False)
class Request:
    """A row to schedule. `arrival` orders requests of one priority; a lower `priority` value runs earlier.

    `num_computed_tokens` is the number of tokens whose KV and state exist, or will when the steps in flight have run:
    0 while waiting. It advances when a step is launched; `num_landed_tokens` follows when its result is applied. The
    last token of a request that decodes is not computed yet. While the step that chooses it is in flight it is not in
    `tokens` either.
    """

    request_id: str
    sample_index: int
    params: SamplingParams
    tokens: TokenBuffer
    priority: int
    arrival: int
    seed: int
    wants_prompt_logprobs: bool = False
    is_prefill_only: bool = False  # ends when its prompt is computed: nothing is sampled
    status: RequestStatus = RequestStatus.WAITING
    residence: Residence | None = None
    num_computed_tokens: int = 0
    num_landed_tokens: int = 0
    num_preemptions: int = 0
    due_checkpoints: dict[int, str] = field(default_factory=dict)  # length -> origin; of a running request
    following: Following | None = None  # of a waiting request
    num_prompt_logits_read: int = 0  # prompt tokens whose logits have been read, if prompt logprobs are wanted
    prefix_hit: PrefixHit | None = None  # set at the first admission
    ending_token_ids: tuple[int, ...] = ()  # would end it: forbidden before `min_tokens` tokens
    end_token_ids: frozenset[int] = frozenset()  # end it
    parting_origin: str | None = None  # of a leaving request: that of the state it is to leave; None: it leaves none
    reads_its_output: bool = field(init=False)  # whether which tokens it has decides on its next one
    alone_until: int = 0  # a forward that would have computed this many tokens failed: run alone up to there
    is_verifying: bool = False  # a step in flight verifies a draft of it, and will say how many tokens it computes
    draft_budget: DraftBudget | None = None  # of a runtime that speculates, from its first round on
    num_lost_states: int = 0  # times that its states could not be written behind accepted drafts

    def __post_init__(self) -> None:
        params = self.params
        penalties = (params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty)
        self.reads_its_output = any(penalties)

    def start_over(self, num_output_tokens: int) -> None:
        """Back to the state of waiting, with the first output tokens; what it owned is declared free elsewhere."""
        self.tokens.truncate(num_output_tokens)
        self.status = RequestStatus.WAITING
        self.residence = None
        self.num_computed_tokens = self.num_landed_tokens = 0
        self.alone_until = 0
        self.following = None
        self.is_verifying = False

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: what comes first is admitted first and preempted last."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are to be computed yet, the one in flight included."""
        num_uncomputed = len(self.tokens) - self.num_computed_tokens
        return num_uncomputed if num_uncomputed > 0 or self.is_prefill_only else 1

    @property
    def is_in_flight(self) -> bool:
        """Whether a step works on it that has been launched and has not landed."""
        return self.num_landed_tokens < self.num_computed_tokens or self.is_verifying

    @property
    def has_token_in_flight(self) -> bool:
        """Whether its last token is being chosen by a step in flight."""
        return self.num_computed_tokens >= len(self.tokens) and not self.is_prefill_only

    @property
    def awaits_its_end(self) -> bool:
        """Whether nothing is left to compute: what is in flight brings the last token, or the end of the prompt."""
        if self.num_computed_tokens < len(self.tokens):
            return False
        return self.is_prefill_only or self.num_computed_tokens + 1 == self.tokens.max_len

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """What the next step to be prepared must not choose: `min_tokens` is not reached."""
        return self.forbidden_after(max(len(self.tokens), self.num_computed_tokens + 1))

    def forbidden_after(self, num_tokens: int) -> tuple[int, ...]:
        """What must not be chosen behind the first `num_tokens` tokens of the text."""
        if not self.ending_token_ids:
            return ()
        return self.ending_token_ids if num_tokens - self.tokens.prompt_len < self.params.min_tokens else ()

    @property
    def tracked(self) -> Checkpoint | None:
        """The latest periodic checkpoint that is in its slot."""
        landed = [checkpoint for checkpoint in self.resident.tracks if checkpoint.length <= self.num_landed_tokens]
        return landed[-1] if landed else None

    @property
    def runs_alone(self) -> bool:
        return self.num_landed_tokens < self.alone_until

    @property
    def may_speculate(self) -> bool:
        """Whether its states could be written behind drafts, but for fewer than `MAX_LOST_STATES` times."""
        return self.num_lost_states < MAX_LOST_STATES

    @property
    def matchable_tokens(self) -> NDArray[np.int32]:
        """The tokens to look up. A prompt token whose logits are wanted and not read yet must be computed."""
        if self.wants_prompt_logprobs and self.num_prompt_logits_read < self.tail_position:
            return self.tokens[: self.num_prompt_logits_read + 1]
        return self.tokens[:]

    @property
    def tail_position(self) -> int:
        """Length of the tail checkpoint: all prompt tokens but the last."""
        return self.tokens.prompt_len - 1

    @property
    def resident(self) -> Residence:
        """The residence of a request that runs."""
        assert self.residence is not None, f"request {self.request_id} is {self.status.value}"
        return self.residence

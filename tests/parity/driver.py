"""Drives a `HybridModel` over real pools with hand-made tables: what an engine does, without scheduler or cache.

Whatever no request owns is poisoned with NaN (slot 0 apart), KV slots are handed out in a scattered order, and table
entries beyond a request's length name slots of others, so that reading anything but one's own memory shows.

Shapes: V vocabulary, B rows, R states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.ragged import RaggedLayout


@dataclass
class Request:
    """A sequence in the pools: its table row, its working slot and how many tokens are computed."""

    row: int
    working_slot: int
    length: int = 0
    state_slots: dict[int, int] = field(default_factory=dict)  # token count -> state slot asked for in a prefill


@dataclass(frozen=True)
class Prompt:
    """Tokens to prefill for a request; `state_lengths`: token counts (absolute) whose states are to be kept."""

    request: Request
    tokens: Sequence[int]
    state_lengths: Sequence[int] = ()


class Driver:
    """Pools and tables for a few requests of one model. Every call is one step."""

    def __init__(
        self,
        model: HybridModel,
        *,
        max_requests: int = 6,
        max_len: int = 400,
        num_state_slots: int = 24,
        chunk_size: int = 64,
    ) -> None:
        self.model = model
        self.chunk_size = chunk_size
        num_kv_slots = max_requests * max_len
        self.kv_pool = Pool(model.kv_layers(), num_kv_slots)
        self.state_pool = Pool(model.state_layers(), num_state_slots)
        self.kv_pool.fill(torch.arange(1, num_kv_slots + 1), torch.nan)
        self.state_pool.fill(torch.arange(1, num_state_slots + 1), torch.nan)
        rng = random.Random(0)
        self._free_kv = rng.sample(range(1, num_kv_slots + 1), num_kv_slots)
        self._free_states = rng.sample(range(1, num_state_slots + 1), num_state_slots)
        self._free_rows = rng.sample(range(1, max_requests + 1), max_requests)
        self.req_to_token = torch.randint(1, num_kv_slots + 1, (max_requests + 1, max_len), dtype=torch.int32)
        self.req_to_token[0] = 0

    @property
    def memory(self) -> StepMemory:
        return StepMemory(self.kv_pool.layers, self.state_pool.layers, self.req_to_token)

    def start(self) -> Request:
        """A new request without tokens."""
        request = Request(self._free_rows.pop(), self._free_states.pop())
        self.state_pool.clear(torch.tensor([request.working_slot]))
        return request

    def resume(self, donor: Request, length: int) -> Request:
        """A new request that shares the donor's KV up to `length` and starts from the state it kept there."""
        request = Request(self._free_rows.pop(), self._free_states.pop(), length)
        self.state_pool.copy(torch.tensor([donor.state_slots[length]]), torch.tensor([request.working_slot]))
        self.req_to_token[request.row, :length] = self.req_to_token[donor.row, :length]
        return request

    def states(self, slot: int) -> list[Tensor]:
        """Copies of all state tensors of one slot."""
        return [tensor[slot].clone() for layer in self.state_pool.layers for tensor in layer.values()]

    def prefill(self, *prompts: Prompt, num_padding: int = 0) -> list[Tensor]:
        """One ragged prefill. Returns the logits `[len(tokens), V]` of each prompt's tokens."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        positions: list[int] = []
        kv_slots: list[int] = []
        state_positions: list[list[int]] = []
        state_slots: list[int] = []
        for prompt in prompts:
            request, begin = prompt.request, prompt.request.length
            request.length += len(prompt.tokens)
            positions += range(begin, request.length)
            kv_slots += [self._append_kv(request, position) for position in range(begin, request.length)]
            for length in prompt.state_lengths:
                request.state_slots[length] = self._free_states.pop()
            state_slots += [*(request.state_slots[length] for length in prompt.state_lengths), request.working_slot]
            state_positions.append([length - begin for length in (*prompt.state_lengths, request.length)])
        padding = [0] * num_padding
        inputs = PrefillInputs(
            layout=RaggedLayout.build(
                lengths, state_positions, num_tokens=sum(lengths) + num_padding, chunk_size=self.chunk_size
            ),
            token_ids_L=torch.tensor([token for prompt in prompts for token in prompt.tokens] + padding),
            positions_L=torch.tensor(positions + padding),
            kv_slots_L=torch.tensor(kv_slots + padding),
            request_rows_S=torch.tensor([prompt.request.row for prompt in prompts]),
            context_lens_S=torch.tensor([prompt.request.length for prompt in prompts]),
            working_slots_S=torch.tensor([prompt.request.working_slot for prompt in prompts]),
            state_slots_R=torch.tensor(state_slots),
            logits_tokens_M=torch.arange(sum(lengths)),
            logits_rows_M=torch.zeros(sum(lengths), dtype=torch.int64),
        )
        return list(self.model.prefill(inputs, self.memory).split(lengths))

    def decode(self, requests: Sequence[Request], tokens: Sequence[int], *, num_padding: int = 0) -> Tensor:
        """One decode step. Returns the logits `[B, V]` of the given tokens."""
        positions = [request.length for request in requests]
        kv_slots = [self._append_kv(request, request.length) for request in requests]
        for request in requests:
            request.length += 1
        padding = [0] * num_padding
        inputs = DecodeInputs(
            token_ids_B=torch.tensor([*tokens, *padding]),
            positions_B=torch.tensor(positions + padding),
            kv_slots_B=torch.tensor(kv_slots + padding),
            request_rows_B=torch.tensor([request.row for request in requests] + padding),
            context_lens_B=torch.tensor([request.length for request in requests] + [1] * num_padding),
            max_context_len=max(request.length for request in requests),
            working_slots_B=torch.tensor([request.working_slot for request in requests] + padding),
        )
        return self.model.decode(inputs, self.memory)[: len(requests)]

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuation of a batch of prompts: one prefill, then decode steps."""
        requests = [self.start() for _ in prompts]
        logits = self.prefill(*(Prompt(request, prompt) for request, prompt in zip(requests, prompts, strict=True)))
        last = [int(rows[-1].argmax()) for rows in logits]
        outputs = [[token] for token in last]
        for _ in range(num_tokens - 1):
            last = self.decode(requests, last).argmax(-1).tolist()
            for output, token in zip(outputs, last, strict=True):
                output.append(token)
        return outputs

    def _append_kv(self, request: Request, position: int) -> int:
        slot = self._free_kv.pop()
        self.req_to_token[request.row, position] = slot
        return slot

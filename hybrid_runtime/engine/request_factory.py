"""Makes a user's request into rows to schedule and completions to fill."""

from __future__ import annotations

import itertools

import numpy as np

from hybrid_runtime.engine.completion import Completion
from hybrid_runtime.engine.request_group import Prompt, RequestGroup
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.scheduling.request import Request, TokenBuffer
from hybrid_runtime.text.detokenizer import TokenDecoder


class RequestFactory:
    """Numbers requests by arrival, and draws the seeds of those that bring none from `seed`."""

    def __init__(
        self, tokenizer: TokenDecoder | None, *, max_model_len: int, eos_token_ids: frozenset[int], seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._seeds = np.random.default_rng(seed)
        self._arrivals = itertools.count()

    def new_group(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        *,
        is_prefill_only: bool = False,
    ) -> RequestGroup:
        """A request with one row and one completion per sample; nothing is queued or allocated."""
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        limit, prompt_len = self._max_model_len, len(prompt.token_ids)
        max_len = limit if params.max_tokens is None else min(limit, prompt_len + params.max_tokens)
        prompt_token_ids = np.array(prompt.token_ids, dtype=np.int32)
        requests: list[Request] = []
        completions: list[Completion] = []
        for index in range(params.n):
            completion = Completion(
                index,
                params,
                prompt.token_ids,
                max_output_tokens=max_len - prompt_len,
                eos_token_ids=self._eos_token_ids,
                tokenizer=self._tokenizer,
            )
            request = Request(
                request_id=request_id,
                sample_index=index,
                params=params,
                tokens=TokenBuffer(prompt_token_ids, max_len),
                priority=priority,
                arrival=next(self._arrivals),
                seed=seed,
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                is_prefill_only=is_prefill_only,
                ending_token_ids=completion.forbidden_token_ids,
                end_token_ids=completion.end_token_ids,
            )
            completions.append(completion)
            requests.append(request)
        return RequestGroup(request_id, prompt, requests, completions)

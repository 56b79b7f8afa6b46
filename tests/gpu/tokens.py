"""What must not change the tokens, on the device, by whole runtimes: caching, chunking, batching, overlap, preemption,
speculation.

The truth are eager runs in float64, each prompt alone. In float64 every other way must give the same tokens. In float32
a first difference is excused where the two tokens' float64 logprobs are closer than rounding explains: each errs at
most twice what an eager float32 run errs on the same texts. Excused texts are counted, and may be one in eight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from tests.engine.helpers import VOCAB_SIZE, greedy, random_tokens, tokens_of
from tests.gpu.report import Details
from tests.speculative.scripted_drafter import ScriptedDrafter
from tests.speculative.speculative_runs import ROLLBACKS, config

NUM_TOKENS = 24
POOLS: dict[str, Any] = {"max_num_seqs": 12, "max_model_len": 256, "num_kv_slots": 4000, "num_state_slots": 80}
SMALL_POOLS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 160, "num_kv_slots": 200, "num_state_slots": 12}
Tokens = list[tuple[int, ...]]


class TokenChecks:
    """The checks of one model on one device, in one dtype."""

    def __init__(self, reference: PreTrainedModel, dtype: str, device: str, compile_mode: str = "auto") -> None:
        self.reference = reference
        self.options: dict[str, Any] = {"dtype": dtype, "device": device, "compile": compile_mode}
        self.exact: dict[str, Any] = {"dtype": "float64", "state_dtype": "float64", "device": device, "compile": "off"}
        if dtype == "float64":
            self.options["state_dtype"] = "float64"
        rng = np.random.default_rng(6)
        header = random_tokens(rng, 70)
        lengths = (1, 2, 31, 64, 65, 97, 130)
        self.prompts = [*(random_tokens(rng, length) for length in lengths), header, header[:40]]
        self.prompts += [header + random_tokens(rng, length) for length in (1, 9, 60)]
        self.truth = self._alone(self.exact)

    def run(self) -> Details:
        """All ways of running the prompts; raises AssertionError with the first text that is wrong."""
        bound = self._rounding_bound()
        excused: dict[str, int] = {}
        for name, tokens in self._ways():
            excused[name] = sum(
                self._is_excused(place, text, bound, name) for place, text in enumerate(tokens, start=0)
            )
            assert excused[name] <= len(self.prompts) // 8, f"{name}: {excused[name]} texts differ"
        return {"logprob bound": bound, **{f"excused, {name}": count for name, count in excused.items()}}

    def _ways(self) -> Iterator[tuple[str, Tokens]]:
        yield "alone", self._alone(self.options)
        for overlap in (False, True):
            suffix = "overlap" if overlap else "no overlap"
            with self._runtime(**POOLS, overlap=overlap) as rt:
                yield f"one batch, {suffix}", tokens_of(rt.generate(self.prompts, greedy(NUM_TOKENS)))
                again = [rt.generate(prompt, greedy(NUM_TOKENS))[0] for prompt in self.prompts]
                assert all(output.num_cached_tokens for output in again if len(output.prompt_token_ids) > 2)
                yield f"again, cached, {suffix}", tokens_of(again)
            with self._runtime(**POOLS, overlap=overlap, max_num_batched_tokens=23) as rt:
                yield f"chunks of 23 tokens, {suffix}", tokens_of(rt.generate(self.prompts, greedy(NUM_TOKENS)))
            with self._runtime(**SMALL_POOLS, overlap=overlap) as rt:
                yield f"preempted, {suffix}", tokens_of(rt.generate(self.prompts, greedy(NUM_TOKENS)))
                assert rt.stats().scheduler.num_preemptions > 0
        for rollback in ROLLBACKS:
            drafter = ScriptedDrafter([p + list(text) for p, text in zip(self.prompts, self.truth, strict=True)])
            with self._runtime(**POOLS, speculative=config(rollback), drafter=drafter) as rt:
                yield f"speculating, {rollback}", tokens_of(rt.generate(self.prompts, greedy(NUM_TOKENS)))
                speculation = rt.stats().speculation
                assert speculation is not None
                assert speculation.num_accepted_tokens > NUM_TOKENS

    def _runtime(self, **options: Any) -> HybridRuntime:
        return HybridRuntime(self.reference, **{**self.options, "debug_checks": True, **options})

    def _alone(self, options: dict[str, Any]) -> Tokens:
        plain = {**POOLS, "max_num_seqs": 1, "enable_prefix_cache": False}
        with HybridRuntime(self.reference, **{**options, **plain}) as rt:
            return [tokens_of(rt.generate(prompt, greedy(NUM_TOKENS)))[0] for prompt in self.prompts]

    def _rounding_bound(self) -> float:
        """Most that rounding may change the difference of two logprobs of one distribution."""
        if self.options["dtype"] == "float64":
            return 1e-9
        texts = [prompt + list(text) for prompt, text in zip(self.prompts, self.truth, strict=True)]
        eager = {**self.options, "compile": "off"}
        ours, truth = (_logprobs(self.reference, texts, options) for options in (eager, self.exact))
        error = max(abs(a - b) for a, b in zip(ours, truth, strict=True))
        return 4 * error  # of two logprobs, each of which errs at most twice what the eager form errs

    def _is_excused(self, place: int, tokens: Sequence[int], bound: float, name: str) -> bool:
        """False where the tokens are the true ones. Raises AssertionError where they may not differ."""
        truth = self.truth[place]
        if tuple(tokens) == truth:
            return False
        first = next(i for i, pair in enumerate(zip(tokens, truth, strict=True)) if pair[0] != pair[1])
        prompt = self.prompts[place] + list(truth[:first])
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCAB_SIZE // 4, ignore_eos=True)
        with HybridRuntime(self.reference, **{**self.exact, **POOLS}) as rt:
            [output] = rt.generate(prompt, params)
        assert output.outputs[0].logprobs is not None
        candidates = output.outputs[0].logprobs[0]
        ours = candidates.get(tokens[first])
        margin = float("inf") if ours is None else candidates[truth[first]].logprob - ours.logprob
        assert margin <= bound, f"{name}: text {place} differs at {first}, where {margin:.3g} is between the tokens"
        return True


def _logprobs(reference: PreTrainedModel, texts: Sequence[list[int]], options: dict[str, Any]) -> list[float]:
    """Of every token of the texts but their first, given those before it."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    with HybridRuntime(reference, **{**options, **POOLS}) as rt:
        outputs = rt.generate(list(texts), params)
    return [logprob for output in outputs for logprob in _of_prompt(output)]


def _of_prompt(output: RequestOutput) -> Iterator[float]:
    assert output.prompt_logprobs is not None
    for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
        if entry is not None:
            yield entry[token].logprob

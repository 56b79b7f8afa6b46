"""`HybridRuntime` in float32 against transformers: chunked prefills, a running batch, the cache, twice over."""

from __future__ import annotations

import pytest

from hybrid_runtime import HybridRuntime, SamplingParams
from tests.parity.runs import NUM_GENERATED, run
from tests.parity.test_generation import MAX_EXCUSED, cases, differs_within_rounding
from tests.parity.zoo import Case

GREEDY = SamplingParams(max_tokens=NUM_GENERATED, temperature=0.0, ignore_eos=True)


@cases
@pytest.mark.parametrize("budget", [2048, 100])
def test_generate_gives_the_tokens_of_transformers(case: Case, budget: int) -> None:
    """Cold and warm: the second time every prompt but its last token comes from the cache."""
    made = run(case)
    with HybridRuntime(
        made.reference,
        max_num_batched_tokens=budget,
        num_kv_slots=4000,
        num_state_slots=40,
        debug_checks=True,
        compile="off",
    ) as rt:
        for num_cached in ([0] * len(made.prompts), [len(prompt) - 1 for prompt in made.prompts]):
            outputs = rt.generate(made.prompts, GREEDY)
            assert [output.num_cached_tokens for output in outputs] == num_cached
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            assert sum(differs_within_rounding(made, index, own) for index, own in enumerate(tokens)) <= MAX_EXCUSED

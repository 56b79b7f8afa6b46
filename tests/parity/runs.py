"""One run of a model from the zoo, by transformers and by us, that several tests look at.

Shapes: V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from tests.parity.driver import Driver
from tests.parity.reference import in_float64, logits_of
from tests.parity.zoo import Case

PROMPT_LENGTHS = (1, 2, 37, 64, 141, 300)
NUM_GENERATED = 32
EPS_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Run:
    """`texts[i]` is `prompts[i]` with our float64 greedy continuation; the logits are of all tokens of the texts."""

    case: Case
    reference: PreTrainedModel
    ours_32: HybridModel
    ours_64: HybridModel
    prompts: list[list[int]]
    texts: list[list[int]]
    reference_logits_32: list[Tensor]  # [len(text), V] each, transformers in float32
    reference_logits_64: list[Tensor]  # the same in float64: the truth

    def driver(self, model: HybridModel) -> Driver:
        return Driver(model, chunk_size=self.case.chunk_size)

    def max_error(self, logits: list[Tensor]) -> float:
        """Largest distance from the truth, over all tokens of all texts."""
        return max(
            float((ours - truth).abs().max()) for ours, truth in zip(logits, self.reference_logits_64, strict=True)
        )

    @functools.cached_property
    def float32_error(self) -> float:
        """What transformers itself errs in float32."""
        return self.max_error(self.reference_logits_32)

    @functools.cached_property
    def float64_bound(self) -> float:
        """Most that two float64 runs may differ by: each errs at most twice what the float32 error scales down to."""
        return 4 * EPS_RATIO * self.float32_error

    @functools.cached_property
    def relative_float64_bound(self) -> float:
        return self.float64_bound / max(float(logits.abs().max()) for logits in self.reference_logits_64)


@functools.cache
def run(case: Case) -> Run:
    """Builds the models of a case and runs them once."""
    reference = case.build()
    ours_64 = adapt(copy.deepcopy(reference).double())
    rng = random.Random(case.name)
    prompts = [[rng.randrange(ours_64.spec.vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    texts = [
        prompt + Driver(ours_64, max_requests=1, chunk_size=case.chunk_size).generate([prompt], NUM_GENERATED)[0]
        for prompt in prompts
    ]
    with in_float64(reference) as wide:
        logits_64 = [logits_of(wide, text) for text in texts]
    return Run(
        case=case,
        reference=reference,
        ours_32=adapt(reference),
        ours_64=ours_64,
        prompts=prompts,
        texts=texts,
        reference_logits_32=[logits_of(reference, text) for text in texts],
        reference_logits_64=logits_64,
    )

"""Choosing the next token of every row of a batch."""

from hybrid_runtime.sampling.inputs import SamplingInputs, SamplingRow
from hybrid_runtime.sampling.logprobs import GatheredLogprobs, gather_logprobs
from hybrid_runtime.sampling.sampler import SampleResult, sample

__all__ = ["GatheredLogprobs", "SampleResult", "SamplingInputs", "SamplingRow", "gather_logprobs", "sample"]

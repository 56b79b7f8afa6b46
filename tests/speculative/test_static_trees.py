"""Rounds as captured steps run them: trees of one size, batches padded to buckets, paths with room for a whole tree.

They give the texts of plain decoding; what a padding row names is not touched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.graphs.commit_runner import CommitRunner
from hybrid_runtime.graphs.verify_runner import VerifyRunner, verify_buckets
from tests.engine.helpers import assert_idle, poison_free_slots
from tests.speculative.speculative_runs import (
    MIXED,
    MIXED_LENGTHS,
    ROOMY,
    TREE_SIZE,
    num_accepted,
    outcomes,
    plain,
    random_prompts,
    scripted,
    speculating,
)

PROMPTS = random_prompts(12, MIXED_LENGTHS)


def fix_sizes(rt: HybridRuntime) -> None:
    """As on CUDA, but for the capture."""
    runner: Any = rt._engine.runner
    sizes: dict[str, Any] = {
        "max_batch": ROOMY["max_num_seqs"],
        "num_nodes": TREE_SIZE,
        "device": torch.device("cpu"),
        "buckets": verify_buckets(ROOMY["max_num_seqs"]),
    }
    runner.steps.tree_size = lambda num_nodes: TREE_SIZE
    runner._verify_runner = VerifyRunner(runner.steps.verify, max_context_len=runner.steps.max_context_len, **sizes)
    if not runner.commits._is_lazy:
        runner._commit_runner = CommitRunner(runner.steps.commit, **sizes)


@pytest.mark.parametrize(("name", "rollback"), [("kimi", "fold"), ("granite-moe-rope", "snapshot"), ("kimi", "replay")])
def test_texts_are_those_of_plain_decoding(name: str, rollback: str) -> None:
    with plain(name) as rt:
        expected = rt.generate(PROMPTS, list(MIXED))
    with speculating(name, scripted(expected, seed=3), rollback) as rt:
        fix_sizes(rt)
        poison_free_slots(rt)
        assert outcomes(rt.generate(PROMPTS, list(MIXED))) == outcomes(expected)
        assert num_accepted(rt) > 10
        assert_idle(rt)


def test_no_bucket_is_larger_than_the_batch() -> None:
    assert verify_buckets(11) == (1, 2, 4, 8, 11)
    assert verify_buckets(1) == (1,)
    assert verify_buckets(16) == (1, 2, 4, 8, 16)

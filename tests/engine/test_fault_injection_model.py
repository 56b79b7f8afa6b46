"""A sample of what `test_fault_injection` does, on a real model with a file behind its pools."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_runtime import HybridRuntime, RequestOutput
from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.host_file import HostFile
from tests.engine.failing_calls import ALLOCATIONS, Counter, failing_calls
from tests.engine.helpers import assert_idle, greedy, random_tokens, runtime_of, solo_tokens


def _outputs(rt: HybridRuntime, prompts: list[list[int]]) -> list[RequestOutput]:
    """Two visits of all prompts."""
    return [*rt.generate(prompts, greedy(9)), *rt.generate(prompts[::-1], greedy(9))[::-1]]


def _real_prompts() -> list[list[int]]:
    rng = np.random.default_rng(41)
    header = random_tokens(rng, 20)
    return [header + random_tokens(rng, 10), header + random_tokens(rng, 3), random_tokens(rng, 25), header[:15]]


@pytest.fixture
def small_runtime(tmp_path: Path) -> Iterator[HybridRuntime]:
    """Real pools that are too small for the prompts, with a file behind them."""
    options: dict[str, Any] = {"num_kv_slots": 60, "num_state_slots": 5, "max_model_len": 50, "max_num_seqs": 3}
    with runtime_of("mamba2", **options) as sizes:
        host_bytes = 200 * sizes.plan.kv_slot_bytes + 8 * sizes.plan.state_slot_bytes
    options |= {"min_saving": 4, "track_interval": 4, "max_num_batched_tokens": 16}
    with runtime_of("mamba2", host_cache_bytes=host_bytes, host_cache_path=str(tmp_path / "tier"), **options) as rt:
        yield rt


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return 2 * solo_tokens("mamba2", _real_prompts(), [9] * 4)


REAL_FAULTS: list[tuple[type, str, Exception]] = [
    *((owner, name, PoolExhausted("planted")) for owner, name in ALLOCATIONS),
    (HostFile, "write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    (HostFile, "read_into", OSError(errno.EIO, os.strerror(errno.EIO))),
]


@pytest.mark.parametrize(("owner", "name", "error"), REAL_FAULTS, ids=[f"{o.__name__}.{n}" for o, n, _ in REAL_FAULTS])
def test_a_real_model_gives_the_same_tokens(
    small_runtime: HybridRuntime, expected: list[tuple[int, ...]], owner: type, name: str, error: Exception
) -> None:
    """At some of the calls of a workload."""
    rt, calls = small_runtime, Counter()
    with failing_calls(owner, name, calls, error):
        _outputs(rt, _real_prompts())
    assert calls.num_calls > 5
    for failing in (calls.num_calls // 3, calls.num_calls // 2):
        rt.reset_prefix_cache()
        counter = Counter(failing)
        with failing_calls(owner, name, counter, error):
            outputs = _outputs(rt, _real_prompts())
        assert counter.has_failed
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert_idle(rt)

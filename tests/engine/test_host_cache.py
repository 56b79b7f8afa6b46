"""Runtimes whose pools are small and whose second tier is in host memory or in a file: what was evicted comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_runtime import HybridRuntime
from hybrid_runtime.engine.host_cache import PoolStore
from hybrid_runtime.outputs import HostCacheStats
from tests.engine.cache_content import assert_content
from tests.engine.helpers import (
    assert_idle,
    greedy,
    model_of,
    poison_free_slots,
    random_tokens,
    runtime_of,
    solo_tokens,
    tokens_of,
)
from tests.engine.test_interrupts import interrupt_at_lines

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "num_kv_slots": 110,
    "num_state_slots": 5,
    "max_model_len": 60,
    "max_num_seqs": 3,
    "min_saving": 1,
    "compile": "off",
}
"""Pools that hold two or three of the prompts below."""


TIERS = [("kda", "memory"), ("mamba2", "file"), ("gdn", "memory")]


def _options(place: str, tmp_path: Path) -> dict[str, Any]:
    options = {**SMALL, "host_cache_bytes": 3_000_000}
    return options if place == "memory" else {**options, "host_cache_path": str(tmp_path / "host")}


def _prompts(num_groups: int = 3, num_tails: int = 2) -> list[list[int]]:
    """Groups of prompts that start with the same 20 tokens."""
    rng = np.random.default_rng(5)
    return [
        [*start, *random_tokens(rng, 10 + 3 * tail)]
        for start in [random_tokens(rng, 20) for _ in range(num_groups)]
        for tail in range(num_tails)
    ]


def _host(rt: HybridRuntime) -> HostCacheStats:
    stats = rt.stats().host_cache
    assert stats is not None
    return stats


@pytest.mark.parametrize(("kind", "place"), TIERS)
def test_hits_are_as_if_nothing_had_been_evicted(kind: str, place: str, tmp_path: Path) -> None:
    prompts = _prompts()
    expected = solo_tokens(kind, prompts, [5] * len(prompts))
    with runtime_of(kind, max_num_seqs=3, min_saving=1) as roomy:
        wanted = [roomy.generate(prompt, greedy(5))[0] for prompt in prompts * 2]
    with runtime_of(kind, **_options(place, tmp_path)) as rt:
        outputs = []
        for prompt in prompts * 2:
            poison_free_slots(rt)
            outputs += rt.generate(prompt, greedy(5))
        assert rt.stats().cache.num_evicted_states > 0
        assert tokens_of(outputs) == expected * 2
        assert [o.num_cached_tokens for o in outputs] == [o.num_cached_tokens for o in wanted]
        assert [o.checkpoint_origin for o in outputs] == [o.checkpoint_origin for o in wanted]
        stats = _host(rt)
        assert stats.num_restored_checkpoints > 0
        assert stats.num_failures == stats.num_skipped_checkpoints == 0
        assert 0 < stats.used_bytes <= stats.total_bytes <= 3_000_000
        rt.save_prefix_cache(tmp_path / "saved")
        assert_idle(rt)
        assert _host(rt).used_bytes == 0
    with runtime_of(kind) as roomy:  # what both tiers held, looked at in one
        assert roomy.load_prefix_cache(tmp_path / "saved").num_checkpoints >= stats.num_checkpoints
        assert_content(roomy)


@pytest.mark.parametrize(("kind", "place"), TIERS)
def test_batches_over_both_tiers_give_the_right_tokens(kind: str, place: str, tmp_path: Path) -> None:
    """More requests than the pools hold, with preemptions; the tier itself is too small for all."""
    prompts = _prompts(num_groups=4)
    expected = solo_tokens(kind, prompts, [12] * len(prompts))
    with runtime_of(kind, **{**_options(place, tmp_path), "host_cache_bytes": 150_000}) as rt:
        for _ in range(2):
            poison_free_slots(rt)
            assert tokens_of(rt.generate(prompts, greedy(12))) == expected
        assert _host(rt).num_restored_checkpoints > 0
        assert_idle(rt)


def test_a_tier_too_small_for_a_prompt_only_skips_it() -> None:
    """It holds 16 tokens at least: the short prompt comes back, the long ones don't."""
    rng = np.random.default_rng(7)
    prompts = [random_tokens(rng, length) for length in (12, 50, 51, 52, 53)]
    expected = solo_tokens("mamba2", prompts, [3] * 5)
    with runtime_of("mamba2") as rt:
        least = 17 * rt.plan.kv_slot_bytes + 2 * rt.plan.state_slot_bytes
    with runtime_of("mamba2", **SMALL, host_cache_bytes=least) as rt:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert tokens_of(rt.generate(prompt, greedy(3))) == [tokens]
        stats = _host(rt)
        assert stats.num_saved_checkpoints >= 1
        assert stats.num_skipped_checkpoints >= 2
        outputs = [rt.generate(prompt, greedy(3))[0] for prompt in prompts[:2]]
        assert [output.num_cached_tokens for output in outputs] == [11, 0]
        assert tokens_of(outputs) == expected[:2]
        assert_idle(rt)


def test_a_preempted_request_resumes_from_the_host() -> None:
    """What a request had computed when it was preempted is not computed again, though the pools evicted it."""
    rng = np.random.default_rng(8)
    prompts = [random_tokens(rng, 40) for _ in range(3)]
    expected = solo_tokens("kda", prompts, [20] * 3)
    computed = []
    for host in (0, 3_000_000):
        with runtime_of("kda", **SMALL, host_cache_bytes=host, track_interval=None) as rt:
            assert tokens_of(rt.generate(prompts, greedy(20))) == expected
            assert rt.stats().scheduler.num_preemptions > 0
            scheduler = rt.stats().scheduler
            computed.append(scheduler.num_prefill_tokens + scheduler.num_decode_tokens)
    assert computed[1] <= computed[0]


def test_reset_empties_both_tiers() -> None:
    prompts = _prompts()
    with runtime_of("gdn", **SMALL, host_cache_bytes=3_000_000) as rt:
        rt.generate(prompts, greedy(2))
        assert _host(rt).num_checkpoints > 0
        rt.reset_prefix_cache()
        assert _host(rt).num_checkpoints == _host(rt).used_bytes == 0
        assert rt.generate(prompts[0], greedy(2))[0].num_cached_tokens == 0


def test_a_tier_is_not_there_unless_asked_for() -> None:
    with runtime_of("gdn") as rt:
        assert rt.stats().host_cache is None


# The file.


def test_the_file_is_gone_at_once_and_its_space_at_the_end(tmp_path: Path) -> None:
    rt = runtime_of("mamba2", **SMALL, host_cache_bytes=3_000_000, host_cache_path=str(tmp_path / "host"))
    tier = rt._engine.memory.tier
    assert tier is not None
    assert isinstance(tier.store, PoolStore)
    file = tier.store.kv.outside._file  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []
    assert not file._file.closed
    rt.close()
    assert file._file.closed
    rt.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache_bytes": 1000}, "host_cache_bytes=1,000 cannot hold a checkpoint of 16 tokens: 16 KV slots x"),
        ({"host_cache_bytes": 2**60}, "is more than the"),
        ({"host_cache_bytes": -1}, "host_cache_bytes must be at least 0"),
        ({"host_cache_bytes": 1.5}, "host_cache_bytes must be an integer"),
        ({"host_cache_path": "/tmp/x"}, "needs host_cache_bytes, which is 0"),
        ({"host_cache_bytes": 10**6, "host_cache_path": ""}, "must be a path or None"),
        ({"host_cache_bytes": 10**6, "host_cache_path": "a\0b"}, "must be a path or None"),
        ({"host_cache_bytes": 10**6, "enable_prefix_cache": False}, "needs enable_prefix_cache=True"),
        ({"host_cache_bytes": 10**6, "host_cache_path": "{tmp}/none/x"}, "No such file or directory"),
        ({"host_cache_bytes": 10**6, "host_cache_path": "{tmp}"}, "exists already"),
        ({"host_cache_bytes": 2**61, "host_cache_path": "{tmp}/huge"}, "a file of 2,305,8"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "host_cache_path" in options:
        options = {**options, "host_cache_path": options["host_cache_path"].format(tmp=tmp_path)}
    with pytest.raises(ValueError, match="host_cache") as error:
        runtime_of("mamba2", **options)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "host").write_text("somebody's")
    with pytest.raises(ValueError, match="exists already"):
        runtime_of("mamba2", host_cache_bytes=10**6, host_cache_path=str(tmp_path / "host"))
    assert (tmp_path / "host").read_text() == "somebody's"


FAILING_DISK = """
import logging, resource, sys
import numpy as np
from tests.engine.helpers import *

rng = np.random.default_rng(9)
prompts = [random_tokens(rng, 40) for _ in range(4)]
expected = solo_tokens("mamba2", prompts, [4] * 4)
options = dict(num_kv_slots=110, num_state_slots=5, max_model_len=60, max_num_seqs=2, min_saving=1)
records = []
logging.getLogger("hybrid_runtime.scheduling.host_tier").addFilter(records.append)

def limit(num_bytes):  # further writes past that many bytes of any file fail, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

with runtime_of("mamba2", host_cache_bytes=3_000_000, host_cache_path=sys.argv[1], **options) as rt:
    def visit():
        outputs = [rt.generate(prompt, greedy(4))[0] for prompt in prompts]
        assert tokens_of(outputs) == expected
        return [output.num_cached_tokens for output in outputs]

    limit(1000)
    assert visit() == [0] * 4
    failed = rt.stats().host_cache
    assert failed.num_failures > 0
    assert failed.num_saved_checkpoints == failed.used_bytes == 0
    assert len(records) == 1, records
    limit(resource.RLIM_INFINITY)
    visit()
    assert visit() == [39] * 4
    assert rt.stats().host_cache.num_failures == failed.num_failures
    assert_idle(rt)
limit(1000)
try:
    runtime_of("mamba2", host_cache_bytes=3_000_000, host_cache_path=sys.argv[1], **options)
except ValueError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more_costs_only_hits(tmp_path: Path) -> None:
    """Real writes that the system refuses, in a process of its own; a full disk at start is refused with a reason."""
    result = subprocess.run(
        [sys.executable, "-c", FAILING_DISK, str(tmp_path / "host")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "a file of" in result.stdout
    assert "cannot be made there: [Errno 27] File too large" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_read_costs_only_hits(tmp_path: Path) -> None:
    """Every read is refused: the tier is emptied, the failure counted, and all requests end as they should."""
    prompts = _prompts()
    expected = solo_tokens("mamba2", prompts, [4] * len(prompts))
    with runtime_of("mamba2", **SMALL, host_cache_bytes=3_000_000, host_cache_path=str(tmp_path / "host")) as rt:
        assert [tokens_of(rt.generate(prompt, greedy(4)))[0] for prompt in prompts] == expected
        assert _host(rt).num_checkpoints > 0
        tier = rt._engine.memory.tier
        assert tier is not None
        assert isinstance(tier.store, PoolStore)
        write_only = os.open(os.devnull, os.O_WRONLY)
        os.dup2(write_only, tier.store.kv.outside._file._file.fileno())  # type: ignore[attr-defined]
        os.close(write_only)
        output = rt.generate(prompts[0], greedy(4))[0]
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == expected[0]
        assert _host(rt).num_failures == 1
        assert [tokens_of(rt.generate(prompt, greedy(4)))[0] for prompt in prompts] == expected
        assert_idle(rt)


def test_the_model_is_float32_and_the_conv_windows_bfloat16_alike() -> None:
    """Records of mixed dtypes survive the way to the host and back: hits give the tokens of an untouched runtime."""
    prompts = _prompts()
    options = {**SMALL, "dtype": "bfloat16", "state_dtype": "float32"}
    with HybridRuntime(model_of("mamba2"), **{**options, "num_kv_slots": 2000, "num_state_slots": 60}) as roomy:
        wanted = [roomy.generate(prompt, greedy(5))[0] for prompt in prompts * 2]
    with HybridRuntime(model_of("mamba2"), **options, host_cache_bytes=3_000_000) as rt:
        outputs = [rt.generate(prompt, greedy(5))[0] for prompt in prompts * 2]
        assert _host(rt).num_restored_checkpoints > 0
    assert tokens_of(outputs) == tokens_of(wanted)
    assert [o.num_cached_tokens for o in outputs] == [o.num_cached_tokens for o in wanted]


@pytest.mark.parametrize("place", ["memory", "file"])
def test_interrupts_at_any_line_lose_no_slot_of_either_tier(place: str, tmp_path: Path) -> None:
    """Each step saves and brings back; whatever line an interrupt hits, the tokens are right and the tiers balance."""
    prompts = _prompts(num_tails=1)
    expected = solo_tokens("mamba2", prompts, [3] * len(prompts))
    options = {**_options(place, tmp_path), "num_kv_slots": 45, "max_model_len": 40, "num_state_slots": 3}
    with runtime_of("mamba2", **options, track_interval=None) as rt:
        count, num_interrupted, num_restored = 1, 0, 0
        while True:
            tokens: dict[str, tuple[int, ...]] = {}
            restored_before = _host(rt).num_restored_checkpoints
            reached = False
            with interrupt_at_lines([count]):
                for index, prompt in enumerate(prompts * 2):
                    rt.add_request(prompt, greedy(3), request_id=str(index))
                    while rt.has_unfinished:
                        try:
                            tokens |= {output.request_id: output.outputs[0].token_ids for output in rt.step()}
                        except KeyboardInterrupt:
                            reached = True
            num_restored += _host(rt).num_restored_checkpoints - restored_before
            assert [tokens[str(index)] for index in range(2 * len(prompts))] == expected * 2, count
            if not reached:
                break
            num_interrupted += 1
            count += 2999
        assert num_interrupted > 10
        assert num_restored > num_interrupted
        assert_idle(rt)

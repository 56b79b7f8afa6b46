"""Prefix caches that are saved and loaded: all of it, what fits of it, or nothing at all."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.cache.radix_cache import RadixCache
from hybrid_runtime.cache.results import InsertResult
from hybrid_runtime.engine import cache_file
from tests.engine.cache_content import assert_content
from tests.engine.helpers import (
    MIXER_KINDS,
    assert_idle,
    greedy,
    model_of,
    runtime_of,
    solo_tokens,
    tokens_of,
)
from tests.engine.saved_caches import checkpoints_of, everything_in, fill, saved_prompts
from tests.engine.test_interrupts import interrupt_at_lines

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", MIXER_KINDS)
def test_a_loaded_cache_is_the_saved_one(kind: str, tmp_path: Path) -> None:
    prompts = saved_prompts()
    expected = solo_tokens(kind, prompts, [6] * len(prompts))
    path = tmp_path / "cache"
    with runtime_of(kind, min_saving=1, checkpoint_interval=5) as rt:
        wanted_hits = fill(rt)
        checkpoints = checkpoints_of(rt)
        result = rt.save_prefix_cache(path)
        assert result.num_checkpoints == len(checkpoints) == rt.prefix_cache.num_state_slots
        assert result.num_tokens == rt.prefix_cache.num_kv_slots
        assert result.num_bytes == path.stat().st_size
        assert checkpoints_of(rt) == checkpoints  # saving changes nothing
    assert list(tmp_path.iterdir()) == [path]
    with runtime_of(kind, min_saving=1) as rt:
        loaded = rt.load_prefix_cache(path)
        assert (loaded.num_checkpoints, loaded.num_tokens) == (result.num_checkpoints, result.num_tokens)
        assert checkpoints_of(rt) == checkpoints
        rt._engine.memory.check([])
        assert_content(rt)
        outputs = [rt.generate(prompt, greedy(6))[0] for prompt in prompts]
        assert [output.num_cached_tokens for output in outputs] == wanted_hits
        assert tokens_of(outputs) == expected
        assert rt.load_prefix_cache(path).num_checkpoints == 0  # it has it all
        assert_idle(rt)


def test_the_file_is_a_safetensors_file_that_others_can_read(saved: Path) -> None:
    tensors = safetensors.torch.load_file(saved)
    with safetensors.safe_open(saved, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "hybrid_runtime.prefix_cache"
    assert metadata["version"] == "1"
    assert set(json.loads(metadata["origins"])) >= {"tail", "final"}
    num_tokens, num_states = len(tensors["tokens"]), len(tensors["checkpoints"])
    assert tensors["lengths"].sum() == num_tokens
    assert tensors["kv.0.k"].shape[0] == num_tokens
    assert tensors["state.0.ssm"].shape[0] == num_states == len(tensors["origins"])
    assert tensors["state.0.ssm"].dtype == torch.float64


def test_an_empty_cache_can_be_saved_and_loaded(tmp_path: Path) -> None:
    with runtime_of("gdn") as rt:
        assert rt.save_prefix_cache(tmp_path / "empty").num_checkpoints == 0
        assert rt.load_prefix_cache(tmp_path / "empty").num_checkpoints == 0
        assert_idle(rt)


def test_what_fits_is_loaded_and_the_most_recent_first(saved: Path) -> None:
    """Pools for a part of it, in a runtime that has something cached: that stays, and the last used comes."""
    prompts = saved_prompts()
    own = [150 - token for token in prompts[0]]
    for num_kv, num_states in ((40, 60), (2000, 5), (24, 3)):
        with runtime_of("mamba2", num_kv_slots=num_kv, num_state_slots=num_states, max_model_len=24) as rt:
            rt.warmup(own[:4])
            before = checkpoints_of(rt)
            loaded = rt.load_prefix_cache(saved)
            rt._engine.memory.check([])
            after = checkpoints_of(rt)
            assert before.items() <= after.items()
            assert 0 < loaded.num_checkpoints == len(after) - len(before)
            assert tuple(prompts[-1][:3]) in after  # of the last prompt
            assert tuple(prompts[0][:17]) not in after  # of the first
            assert_content(rt)
            assert rt.stats().cache.num_evicted_states == 0
            tokens = [rt.generate(prompt, greedy(3))[0].outputs[0].token_ids for prompt in prompts]
            assert tokens == solo_tokens("mamba2", prompts, [3] * len(prompts))
            assert_idle(rt)


def test_the_order_of_use_survives(saved: Path) -> None:
    """The next eviction takes what would have been evicted next before."""
    with runtime_of("mamba2", eviction="lru") as rt:
        rt.load_prefix_cache(saved)
        cache = rt._engine.memory.cache
        num_states = cache.num_state_slots
        rt._engine.memory.supply.release(cache.evict_state(num_states - 2))
        prompt = tuple(saved_prompts()[-1])
        assert {prefix[:4] for prefix in checkpoints_of(rt)} == {prompt[:3], prompt[:4]}


def test_what_the_pools_cannot_take_goes_to_the_host_tier(saved: Path, tmp_path: Path) -> None:
    prompts = saved_prompts()
    small: dict[str, Any] = {"num_kv_slots": 40, "num_state_slots": 4, "max_model_len": 30, "min_saving": 1}
    with runtime_of("mamba2", **small, host_cache_bytes=3_000_000) as rt:
        loaded = rt.load_prefix_cache(saved)
        assert loaded.num_checkpoints > rt.prefix_cache.num_state_slots > 0
        host = rt.stats().host_cache
        assert host is not None
        assert host.num_checkpoints == loaded.num_checkpoints - rt.prefix_cache.num_state_slots
        rt._engine.memory.check([])
        again = rt.save_prefix_cache(tmp_path / "again")  # both tiers, the device's part and the host's
        assert again.num_checkpoints == loaded.num_checkpoints
        outputs = [rt.generate(prompt, greedy(3))[0] for prompt in prompts]
        assert [output.num_cached_tokens for output in outputs] == [len(prompt) - 1 for prompt in prompts]
        assert_idle(rt)
    with runtime_of("mamba2") as rt:
        rt.load_prefix_cache(tmp_path / "again")
        assert_content(rt)


def test_saving_and_loading_while_requests_run(saved: Path, tmp_path: Path) -> None:
    prompts = saved_prompts()
    expected = solo_tokens("mamba2", prompts, [8] * len(prompts))
    with runtime_of("mamba2", max_num_batched_tokens=20) as rt:
        ids = [rt.add_request(prompt, greedy(8)) for prompt in prompts]
        tokens: dict[str, tuple[int, ...]] = {}
        for count in range(1000):
            if count == 5:
                rt.save_prefix_cache(tmp_path / "while")
            if count == 2:
                assert rt.load_prefix_cache(saved).num_checkpoints > 0
            tokens |= {output.request_id: output.outputs[0].token_ids for output in rt.step()}
            if not rt.has_unfinished:
                break
        assert [tokens[request_id] for request_id in ids] == expected
        assert_idle(rt)
    with runtime_of("mamba2") as rt:
        assert rt.load_prefix_cache(tmp_path / "while").num_checkpoints > 0
        assert_content(rt)


# What is refused.


def test_without_a_prefix_cache_there_is_nothing_to_save(saved: Path, tmp_path: Path) -> None:
    with runtime_of("mamba2", enable_prefix_cache=False) as rt:
        with pytest.raises(ValueError, match="enable_prefix_cache is False"):
            rt.load_prefix_cache(saved)
        with pytest.raises(ValueError, match="enable_prefix_cache is False"):
            rt.save_prefix_cache(tmp_path / "cache")


# Faults while a file is written or read.


def test_a_read_that_fails_late_changes_nothing(
    saved: Path, reader: HybridRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file becomes unreadable behind the verification, at each of the reads that follow."""
    before = everything_in(reader)
    real = cache_file.CheckedReader.read_rows
    for failing in range(200):
        calls = iter(range(1000))

        def read(self: Any, name: str, start: int, stop: int) -> torch.Tensor:
            if next(calls) == failing:  # noqa: B023  # used within this turn of the loop
                write_only = os.open(os.devnull, os.O_WRONLY)
                os.dup2(write_only, self._file.fileno())
                os.close(write_only)
            return real(self, name, start, stop)

        monkeypatch.setattr(cache_file.CheckedReader, "read_rows", read)
        try:
            reader.load_prefix_cache(saved)
        except OSError:
            assert everything_in(reader) == before
        else:
            break
    assert failing > 12
    assert next(calls) <= failing
    reader._engine.memory.check([])
    rt = reader
    rt.reset_prefix_cache()


FULL_DISK = """
import os, resource, sys
from tests.engine.saved_caches import fill
from tests.engine.helpers import runtime_of

with runtime_of("mamba2") as rt:
    fill(rt)
    size = rt.save_prefix_cache(sys.argv[1]).num_bytes
    old = open(sys.argv[1], "rb").read()
    for limit in (0, 100, 5000, size // 2, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            rt.save_prefix_cache(sys.argv[1])
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(error)
        assert open(sys.argv[1], "rb").read() == old
        rt._engine.memory.check([])
    rt.save_prefix_cache(sys.argv[1])
"""


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "cache")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[Errno 27] the prefix cache cannot be saved: File too large") == 5
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("call", ["save_prefix_cache", "load_prefix_cache"])
def test_interrupts_at_any_line_leave_whole_files_and_a_usable_runtime(call: str, saved: Path, tmp_path: Path) -> None:
    """Saving loses nothing of the cache; loading may end in a fresh start, but never in wrong tokens."""
    prompt = saved_prompts()[-1]
    (expected,) = solo_tokens("mamba2", [prompt], [3])
    path = tmp_path / "cache"
    shutil.copy(saved, path)
    with runtime_of("mamba2") as rt:
        rt.load_prefix_cache(saved)
        num_checkpoints, count = rt.prefix_cache.num_state_slots, 1
        while True:
            try:
                with interrupt_at_lines([count], entries=(call,)):
                    getattr(rt, call)(path)
                break
            except KeyboardInterrupt:
                count += 61
            assert os.listdir(tmp_path) == ["cache"]
            assert path.read_bytes()[:8] == saved.read_bytes()[:8]
            assert tokens_of(rt.generate(prompt, greedy(3))) == [expected]
            if call == "save_prefix_cache":
                assert rt.prefix_cache.num_state_slots >= num_checkpoints
        assert count > 61 * 5
        assert_idle(rt)


def test_a_float32_model_in_memory_shares_its_file_with_its_double(tmp_path: Path) -> None:
    """Two runtimes on one model: the fingerprint is of what the weights are, not of where they are."""
    with HybridRuntime(model_of("kda"), num_kv_slots=200, num_state_slots=20, compile="off") as first:
        first.generate(saved_prompts()[0], greedy(2))
        first.save_prefix_cache(tmp_path / "cache")
        with HybridRuntime(model_of("kda"), num_kv_slots=300, num_state_slots=10, compile="off") as second:
            assert second.load_prefix_cache(tmp_path / "cache").num_checkpoints == 2


def test_a_link_stays_a_link(saved: Path, reader: HybridRuntime, tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_bytes(saved.read_bytes())
    link.symlink_to(target)
    num_bytes = reader.save_prefix_cache(link).num_bytes
    assert link.is_symlink()
    assert target.stat().st_size == num_bytes


def test_an_error_amid_the_insertions_starts_the_cache_over(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot is lost, whatever it was; requests go on."""
    with runtime_of("mamba2") as rt:
        calls = itertools.count()
        insert = RadixCache.insert

        def failing(*arguments: Any, **options: Any) -> InsertResult:
            if next(calls) == 1:
                raise MemoryError("planted")
            return insert(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(RadixCache, "insert", failing)
            with pytest.raises(RuntimeError, match="the cache starts over"):
                rt.load_prefix_cache(saved)
        stats = rt.stats()
        assert (stats.kv.in_use, stats.state.in_use) == (0, 0)
        assert rt.load_prefix_cache(saved).num_checkpoints > 1
        assert_idle(rt)

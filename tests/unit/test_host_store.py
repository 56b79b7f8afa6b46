"""Contents of the second tier: what is written to a slot is what is read from it, in memory and in a file."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.memory.host_file import FileSlots, HostFile
from hybrid_runtime.memory.host_plan import MIN_TOKENS, plan_host_tier
from hybrid_runtime.memory.host_store import MemorySlots, PoolSlots, Rows, SlotContents, TierPool, chunks, runs
from hybrid_runtime.memory.plan import MemoryPlan
from hybrid_runtime.memory.pools import LayerSpec, Pool, TensorSpec, bytes_per_slot

CPU = torch.device("cpu")
LAYERS: tuple[LayerSpec, ...] = (
    {"k": TensorSpec((2, 3), torch.bfloat16), "v": TensorSpec((5,), torch.float32)},
    {"state": TensorSpec((1, 2, 2), torch.float64), "count": TensorSpec((), torch.int32)},
)
NUM_SLOTS = 12

slot_lists = st.lists(st.integers(1, NUM_SLOTS), max_size=NUM_SLOTS, unique=True)


def _slots(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _rows(slots: np.ndarray) -> Rows:
    """Contents that tell slots, layers, names and elements apart."""
    return tuple(
        {
            name: (
                torch.arange(math.prod(spec.shape)).reshape(spec.shape)[None] / 8
                + torch.from_numpy(slots.astype(np.int64)).reshape(-1, *[1] * len(spec.shape)) * 4
                + place
            ).to(spec.dtype)
            for place, (name, spec) in enumerate(layer.items(), start=10 * number)
        }
        for number, layer in enumerate(LAYERS)
    )


def _assert_equal(actual: Rows, expected: Rows) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name])


@pytest.fixture(scope="module", params=["memory", "file", "pool"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], SlotContents]:
    def build() -> SlotContents:
        if request.param == "memory":
            return MemorySlots(LAYERS, NUM_SLOTS, CPU)
        if request.param == "pool":
            return PoolSlots(Pool(LAYERS, NUM_SLOTS), CPU)
        path = tmp_path_factory.mktemp("host") / "file"
        return FileSlots(LAYERS, HostFile(path, 100 + NUM_SLOTS * bytes_per_slot(LAYERS)), 100)

    return build


@given(writes=st.lists(slot_lists, max_size=3), read=slot_lists)
def test_what_was_written_last_is_read(
    make: Callable[[], SlotContents], writes: list[list[int]], read: list[int]
) -> None:
    contents = make()
    contents.write(_slots(list(range(1, NUM_SLOTS + 1))), _rows(_slots([0] * NUM_SLOTS)))
    marks = dict.fromkeys(range(1, NUM_SLOTS + 1), 0)
    for number, slots in enumerate(writes, start=1):
        contents.write(_slots(slots), _rows(_slots([100 * number + slot for slot in slots])))
        marks |= {slot: 100 * number + slot for slot in slots}
    _assert_equal(contents.read(_slots(read), CPU), _rows(_slots([marks[slot] for slot in read])))
    contents.close()
    contents.close()


def test_what_is_read_is_a_copy(make: Callable[[], SlotContents]) -> None:
    contents, slots = make(), _slots([2, 3])
    contents.write(slots, _rows(slots))
    rows = contents.read(slots, CPU)
    contents.write(slots, _rows(slots + 1))
    _assert_equal(rows, _rows(slots))


@given(slots=slot_lists)
def test_runs_are_the_slots_in_their_order(slots: list[int]) -> None:
    pieces = list(runs(_slots(slots)))
    assert [first + step for first, _, count in pieces for step in range(count)] == slots
    assert [place for _, place, _ in pieces] == list(np.cumsum([0, *[count for _, _, count in pieces]])[:-1])
    for (first, _, count), (following, _, _) in pairwise(pieces):
        assert following != first + count  # as long as can be


@given(length=st.integers(0, 30), size=st.integers(1, 40))
def test_chunks_cover_everything_once(length: int, size: int) -> None:
    pieces = [list(range(length))[part] for part in chunks(length, size)]
    assert [*chain(*pieces)] == list(range(length))
    assert all(1 <= len(piece) <= size for piece in pieces)


def test_copies_of_many_slots_go_in_pieces(make: Callable[[], SlotContents], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_runtime.memory.host_store.MAX_CHUNK_BYTES", 3 * bytes_per_slot(LAYERS))
    pool, outside = Pool(LAYERS, NUM_SLOTS), make()
    tier = TierPool(pool, LAYERS, outside, CPU)
    sources, between, destinations = (
        _slots([1, 2, 3, 9, 8, 7, 5]),
        _slots([3, 4, 5, 6, 7, 12, 1]),
        _slots([*range(6, 13)]),
    )
    PoolSlots(pool, CPU).write(sources, _rows(sources))
    tier.save(sources, between)
    _assert_equal(outside.read(between, CPU), _rows(sources))
    tier.restore(between, destinations)
    _assert_equal(PoolSlots(pool, CPU).read(destinations, CPU), _rows(sources))


def test_a_pool_without_layers_has_nothing_to_copy(tmp_path: Path) -> None:
    for outside in (MemorySlots((), 5, CPU), FileSlots((), HostFile(tmp_path / "file", 0), 0)):
        tier = TierPool(Pool((), 5), (), outside, CPU)
        tier.save(_slots([1, 2]), _slots([3, 5]))
        tier.restore(_slots([3, 5]), _slots([1, 2]))


# The file.


def test_two_regions_of_a_file_do_not_touch(tmp_path: Path) -> None:
    record = bytes_per_slot(LAYERS)
    file = HostFile(tmp_path / "file", 5 * record)
    first, second = FileSlots(LAYERS, file, 0), FileSlots(LAYERS, file, 2 * record)
    first.write(_slots([1, 2]), _rows(_slots([1, 2])))
    second.write(_slots([1, 2, 3]), _rows(_slots([11, 12, 13])))
    first.write(_slots([2]), _rows(_slots([20])))
    _assert_equal(first.read(_slots([1, 2]), CPU), _rows(_slots([1, 20])))
    _assert_equal(second.read(_slots([1, 2, 3]), CPU), _rows(_slots([11, 12, 13])))


def test_the_file_has_its_space_and_no_name(tmp_path: Path) -> None:
    file = HostFile(tmp_path / "file", 100_000)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file._file.fileno())
    assert status.st_size == 100_000
    assert status.st_blocks * 512 >= 100_000
    HostFile(tmp_path / "file", 100).close()  # another one under the same name is another file
    file.close()


def test_a_record_behind_the_end_cannot_be_read(tmp_path: Path) -> None:
    slots = FileSlots(LAYERS, HostFile(tmp_path / "file", bytes_per_slot(LAYERS)), 0)
    slots.read(_slots([1]), CPU)
    with pytest.raises(OSError, match="ends at byte"):
        slots.read(_slots([2]), CPU)


def test_a_write_that_the_system_cuts_short_raises(tmp_path: Path) -> None:
    """The first bytes of a record still fit: the write is short, and what follows it fails."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from hybrid_runtime.memory.host_file import HostFile
file = HostFile(sys.argv[1], 10_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, {resource.RLIM_INFINITY}))
file.write(5_000, memoryview(bytes(1_000)))
try:
    file.write(5_500, memoryview(b"x" * 1_000))
except OSError as error:
    print(error)
part = bytearray(1_000)
file.read_into(5_500, memoryview(part))
print(part.count(b"x"))
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[Errno 27] File too large", "500"]


# The plan.


@given(
    kv_bytes=st.sampled_from([0, 1, 100, 4096]),
    state_bytes=st.sampled_from([0, 1, 1000, 100_000]),
    num_kv=st.integers(1, 10_000),
    num_states=st.integers(1, 100),
    host_bytes=st.integers(1, 10**7),
)
def test_a_plan_uses_its_bytes_and_no_more(
    kv_bytes: int, state_bytes: int, num_kv: int, num_states: int, host_bytes: int
) -> None:
    device = MemoryPlan(num_kv, num_states, 10, kv_bytes, state_bytes)
    least = (MIN_TOKENS + 1) * kv_bytes + 2 * state_bytes
    if host_bytes < least:
        with pytest.raises(ValueError, match=f"cannot hold a checkpoint of {MIN_TOKENS} tokens.*= {least:,} B"):
            plan_host_tier(host_bytes, None, device)
        return
    plan = plan_host_tier(host_bytes, None, device)
    assert plan.num_kv_slots >= MIN_TOKENS
    assert plan.num_state_slots >= 1
    assert plan.num_bytes <= host_bytes
    if kv_bytes:
        assert plan.num_bytes > host_bytes - kv_bytes
    elif state_bytes:
        assert plan.num_bytes > host_bytes - 2 * state_bytes


def test_a_tier_of_the_size_of_the_pools_is_divided_as_they_are() -> None:
    device = MemoryPlan(1000, 20, 100, kv_slot_bytes=64, state_slot_bytes=5000)
    plan = plan_host_tier(device.num_bytes, device.num_bytes, device)
    assert (plan.num_kv_slots, plan.num_state_slots) == (1000, 20)
    assert plan_host_tier(10 * device.num_bytes, None, device).num_state_slots in (208, 209)
    with pytest.raises(ValueError, match="is more than the"):
        plan_host_tier(device.num_bytes, device.num_bytes - 1, device)

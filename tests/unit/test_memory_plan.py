"""The memory plan: its arithmetic, its defaults, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.memory.plan import MemoryPlan, plan_memory
from hybrid_runtime.memory.pools import LayerSpec, Pool, TensorSpec

GIB = 2**30


def layers_of(num_layers: int, num_floats: int) -> tuple[LayerSpec, ...]:
    """Layers whose slots take `4 * num_floats` bytes each."""
    return tuple({"x": TensorSpec((num_floats,), torch.float32)} for _ in range(num_layers))


KV_LAYERS = layers_of(2, 8)  # 64 B per slot
STATE_LAYERS = layers_of(3, 100)  # 1,200 B per slot


def plan(
    available_bytes: int = GIB,
    *,
    kv_layers: tuple[LayerSpec, ...] = KV_LAYERS,
    state_layers: tuple[LayerSpec, ...] = STATE_LAYERS,
    model_max_len: int = 512,
    **options: Any,
) -> MemoryPlan:
    return plan_memory(
        RuntimeConfig(**options), kv_layers, state_layers, model_max_len=model_max_len, available_bytes=available_bytes
    )


def test_sizes_that_are_given_are_taken_and_added_up_with_the_null_slots():
    made = plan(num_kv_slots=100, num_state_slots=7, max_model_len=90)
    assert made == MemoryPlan(100, 7, 90, kv_slot_bytes=64, state_slot_bytes=1200)
    assert made.num_bytes == 101 * 64 + 8 * 1200
    for number in ("100 KV slots x 64 B", "7 state slots x 1,200 B", f"= {made.num_bytes:,} B"):
        assert number in made.describe()


def test_the_bytes_are_those_of_the_pools():
    made = plan(num_kv_slots=20, num_state_slots=3, max_model_len=10)
    pools = (Pool(KV_LAYERS, made.num_kv_slots), Pool(STATE_LAYERS, made.num_state_slots))
    tensors = [tensor for pool in pools for layer in pool.layers for tensor in layer.values()]
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == made.num_bytes


def test_memory_bytes_goes_before_what_is_available():
    assert plan(10**12, memory_bytes=200_000).num_bytes <= 200_000
    assert plan(1, memory_bytes=GIB).num_bytes > 1


def test_the_model_limits_the_length_unless_a_shorter_one_is_asked_for():
    assert plan(model_max_len=300).max_model_len == 300
    assert plan(model_max_len=300, max_model_len=40).max_model_len == 40


def test_a_length_nobody_asked_for_shrinks_to_the_pool():
    assert plan(model_max_len=300, num_kv_slots=120).max_model_len == 120
    made = plan(100 * 64 + 2 * 1200, model_max_len=10**6, num_state_slots=1)
    assert made.max_model_len == made.num_kv_slots == 99


def test_no_more_kv_than_the_rows_can_use_several_times_over():
    made = plan(10**15, model_max_len=100, max_num_seqs=3)
    assert made.num_kv_slots == 100 * 3 * 8
    assert made.num_state_slots >= 6


def test_two_states_per_row_where_there_is_room():
    assert plan(max_num_seqs=50).num_state_slots >= 100


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"max_model_len": 513}, ["max_model_len=513", "512"]),
        ({"max_model_len": 101, "num_kv_slots": 100}, ["max_model_len=101", "num_kv_slots=100", "64 B", "1,200 B"]),
        ({"memory_bytes": 1}, ["1 B", "64 B", "1,200 B", f"{2 * 64 + 2 * 1200:,} B"]),
        ({"memory_bytes": 100_000, "num_kv_slots": 2000}, ["2,000 KV slots", "100,000 B"]),
        ({"memory_bytes": 100_000, "num_state_slots": 90}, ["90 state slots", f"{100_000:,} B"]),
        ({"num_kv_slots": 10**6, "num_state_slots": 10**6}, ["1,000,000 KV slots", "1,000,000 state", f"{GIB:,} B"]),
        ({"num_kv_slots": 1, "num_state_slots": 1}, ["max_model_len=1"]),
        ({"max_model_len": 1}, ["max_model_len=1"]),
        ({"max_model_len": 400, "memory_bytes": 400 * 64}, ["400", "25,600 B"]),
    ],
)
def test_a_refusal_shows_the_numbers(options, numbers):
    with pytest.raises(ValueError, match=r"\d") as refusal:
        plan(**options)
    for number in numbers:
        assert number in str(refusal.value)


def test_a_model_without_attention_pays_nothing_for_kv():
    made = plan(100_000, kv_layers=(), max_num_seqs=4)
    assert made.kv_slot_bytes == 0
    assert made.max_model_len == 512
    assert made.num_kv_slots >= made.max_model_len
    assert made.num_bytes == (made.num_state_slots + 1) * 1200 <= 100_000


def test_a_model_without_recurrent_layers_pays_nothing_for_states():
    made = plan(100_000, state_layers=(), max_num_seqs=4)
    assert made.state_slot_bytes == 0
    assert made.num_state_slots >= 8
    assert made.num_bytes == (made.num_kv_slots + 1) * 64 <= 100_000


def test_a_model_without_either_takes_no_memory():
    assert plan(0, kv_layers=(), state_layers=()).num_bytes == 0


SIZES = {
    "kv_floats": st.integers(0, 500),
    "state_floats": st.integers(0, 100_000),
    "model_max_len": st.integers(2, 5000),
    "max_num_seqs": st.integers(1, 64),
}
# Memory in hundredths of the least that would do, so that both sides of the limit are met often.
PERCENT = st.integers(0, 300) | st.integers(300, 10**6)


def plan_or_refuse(
    least: int, percent: int, kv_floats: int, state_floats: int, model_max_len: int, **options: Any
) -> MemoryPlan | None:
    """The plan of one layer of each kind, which must be within the limit; None where the least would not fit."""
    limit = least * percent // 100
    layers = {"kv_layers": layers_of(1, kv_floats), "state_layers": layers_of(1, state_floats)}
    if limit < least:
        with pytest.raises(ValueError, match=f"{limit:,} B|max_model_len"):
            plan(limit, model_max_len=model_max_len, **layers, **options)
        return None
    made = plan(limit, model_max_len=model_max_len, **layers, **options)
    assert least <= made.num_bytes <= limit
    assert 2 <= made.max_model_len <= min(made.num_kv_slots, model_max_len)
    assert made.num_state_slots >= 1
    return made


@given(**SIZES, percent=PERCENT)
def test_defaults_use_what_is_there_and_never_more(kv_floats, state_floats, model_max_len, max_num_seqs, percent):
    least = 3 * 4 * kv_floats + 2 * 4 * state_floats  # a prompt token, an output token, a state, and the null slots
    plan_or_refuse(least, percent, kv_floats, state_floats, model_max_len, max_num_seqs=max_num_seqs)


@given(**SIZES, percent=PERCENT)
@example(kv_floats=25, state_floats=250, model_max_len=600, max_num_seqs=32, percent=150)
def test_a_length_is_refused_only_if_one_such_request_would_not_fit(
    kv_floats, state_floats, model_max_len, max_num_seqs, percent
):
    options = {"max_model_len": model_max_len, "max_num_seqs": max_num_seqs}
    least = (model_max_len + 1) * 4 * kv_floats + 2 * 4 * state_floats
    made = plan_or_refuse(least, percent, kv_floats, state_floats, model_max_len, **options)
    assert made is None or made.max_model_len == model_max_len


@given(**SIZES, percent=PERCENT, num_kv_slots=st.integers(2, 5000))
@example(kv_floats=25, state_floats=250, model_max_len=512, max_num_seqs=32, percent=120, num_kv_slots=1000)
def test_states_take_what_the_wanted_kv_leaves(
    kv_floats, state_floats, model_max_len, max_num_seqs, percent, num_kv_slots
):
    options = {"num_kv_slots": num_kv_slots, "max_num_seqs": max_num_seqs}
    least = (num_kv_slots + 1) * 4 * kv_floats + 2 * 4 * state_floats
    made = plan_or_refuse(least, percent, kv_floats, state_floats, model_max_len, **options)
    assert made is None or made.num_kv_slots == num_kv_slots


@given(**SIZES, percent=PERCENT, num_state_slots=st.integers(1, 200))
def test_kv_takes_what_the_wanted_states_leave(
    kv_floats, state_floats, model_max_len, max_num_seqs, percent, num_state_slots
):
    options = {"num_state_slots": num_state_slots, "max_num_seqs": max_num_seqs}
    least = 3 * 4 * kv_floats + (num_state_slots + 1) * 4 * state_floats
    made = plan_or_refuse(least, percent, kv_floats, state_floats, model_max_len, **options)
    assert made is None or made.num_state_slots == num_state_slots


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 10**12},
        {"num_state_slots": 10**12, "state_layers": ()},
        {"num_kv_slots": 10**12, "kv_layers": ()},
    ],
)
def test_bookkeeping_that_would_not_fit_is_refused_with_its_size(options: dict[str, Any]):
    """Slots that take no bytes on the device still take some in the free lists, and rows in the request table."""
    with pytest.raises(ValueError, match=r"bookkeeping.*1000000000000.* takes [0-9,]{17,} B"):
        plan(**options)

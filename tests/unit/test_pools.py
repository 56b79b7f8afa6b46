"""Copies and fills of slots touch what they name, in every layer, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.memory.pools import Pool, TensorSpec, bytes_per_slot

NUM_SLOTS = 6
LAYERS = (
    {"k": TensorSpec((2, 3), torch.float32), "v": TensorSpec((2, 4), torch.bfloat16)},
    {"state": TensorSpec((3,), torch.float64)},
    {"count": TensorSpec((), torch.float32)},
)
SLOTS = st.permutations(range(1, NUM_SLOTS + 1))


def numbered_pool() -> Pool:
    """A pool whose every entry says which layer, tensor, slot and place it is in."""
    pool = Pool(LAYERS, NUM_SLOTS)
    for number, tensor in enumerate(tensors_of(pool)):
        tensor.copy_((torch.arange(tensor.numel()) + 100 * number).reshape(tensor.shape))
    return pool


def tensors_of(pool: Pool) -> list[Tensor]:
    return [tensor for layer in pool.layers for tensor in layer.values()]


def snapshot(pool: Pool) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_of(pool)]


def indices(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_one_tensor_per_layer_and_name_with_a_null_slot_all_zero():
    pool = Pool(LAYERS, NUM_SLOTS)
    assert [list(layer) for layer in pool.layers] == [["k", "v"], ["state"], ["count"]]
    for layer, specs in zip(pool.layers, LAYERS, strict=True):
        for name, spec in specs.items():
            assert layer[name].shape == (NUM_SLOTS + 1, *spec.shape)
            assert layer[name].dtype == spec.dtype
            assert layer[name].is_contiguous()
            assert not layer[name].any()
    assert len({tensor.data_ptr() for tensor in tensors_of(pool)}) == 4


@given(SLOTS, st.integers(0, NUM_SLOTS), st.data())
def test_a_copy_changes_its_destinations_only(slots, num_destinations, data):
    destinations, others = slots[:num_destinations], [0, *slots[num_destinations:]]
    sources = data.draw(st.lists(st.sampled_from(others), min_size=num_destinations, max_size=num_destinations))
    pool = numbered_pool()
    before = snapshot(pool)
    pool.copy(indices(sources), indices(destinations))
    for tensor, old in zip(tensors_of(pool), before, strict=True):
        for source, destination in zip(sources, destinations, strict=True):
            assert tensor[destination].equal(old[source])
        assert tensor[others].equal(old[others])


@given(SLOTS, st.integers(0, NUM_SLOTS), st.sampled_from([None, 0.0, -2.5, torch.nan, torch.inf]))
def test_a_fill_or_clear_changes_its_slots_only(slots, count, value):
    chosen, others = slots[:count], [0, *slots[count:]]
    pool = numbered_pool()
    before = snapshot(pool)
    if value is None:
        pool.clear(indices(chosen))
    else:
        pool.fill(indices(chosen), value)
    for tensor, old in zip(tensors_of(pool), before, strict=True):
        expected = torch.full_like(tensor[chosen], value or 0.0)
        torch.testing.assert_close(tensor[chosen], expected, rtol=0, atol=0, equal_nan=True)
        assert tensor[others].equal(old[others])


def test_views_of_the_layers_see_what_the_pool_writes():
    pool = numbered_pool()
    state = pool.layers[1]["state"]
    pool.clear(indices([2, 3]))
    assert not state[2:4].any()
    assert state[1].all()


@pytest.mark.parametrize("num_slots", [0, 3])
def test_a_pool_without_layers_does_nothing(num_slots):
    pool = Pool((), num_slots)
    pool.copy(indices([]), indices([]))
    pool.clear(indices([0]))
    assert pool.layers == ()


def test_bytes_of_a_slot_are_summed_over_layers_and_tensors():
    assert bytes_per_slot(LAYERS) == (6 * 4 + 8 * 2) + 3 * 8 + 4
    assert bytes_per_slot(()) == 0
    pool = Pool(LAYERS, NUM_SLOTS)
    assert sum(t.numel() * t.itemsize for t in tensors_of(pool)) == (NUM_SLOTS + 1) * bytes_per_slot(LAYERS)

"""Copies and clears of slots in all tensors of a pool at once, against the pool's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.memory.pools import Pool, TensorSpec
from hybrid_runtime.ops.triton_kernels import SlotTable, clear_slots, copy_slots
from hybrid_runtime.ops.triton_kernels.slot_copies import CHUNK_BYTES

NUM_SLOTS = 6
# Slots of whole vectors, of bytes, of one chunk, of a chunk and a vector, of a chunk and a byte, and of nothing.
LAYERS = (
    {"k": TensorSpec((2, 4), torch.float32), "odd": TensorSpec((3,), torch.bfloat16)},
    {
        "state": TensorSpec((CHUNK_BYTES // 4,), torch.float32),
        "longer": TensorSpec((CHUNK_BYTES // 8 + 2,), torch.float64),
    },
    {"bytes": TensorSpec((CHUNK_BYTES + 1,), torch.int8), "scalar": TensorSpec((), torch.float32)},
    {"empty": TensorSpec((0, 5), torch.float32)},
)


def numbered_pool() -> Pool:
    """Every byte is random, NaN patterns included."""
    pool = Pool(LAYERS, NUM_SLOTS)
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors_of(pool):
        if tensor.numel():
            contents = tensor.reshape(-1).view(torch.int8)
            contents.copy_(torch.randint(-128, 128, contents.shape, generator=generator))
    return pool


def tensors_of(pool: Pool) -> list[Tensor]:
    return [tensor for layer in pool.layers for tensor in layer.values()]


def assert_same_bytes(pool: Pool, expected: Pool) -> None:
    for tensor, other in zip(tensors_of(pool), tensors_of(expected), strict=True):
        assert tensor.reshape(-1).view(torch.int8).equal(other.reshape(-1).view(torch.int8))


@given(st.permutations(range(1, NUM_SLOTS + 1)), st.integers(0, 3), st.integers(0, 2), st.data())
@settings(max_examples=12, deadline=None)
def test_a_copy_is_the_pools(slots: list[int], num_pairs: int, num_padding: int, data: st.DataObject) -> None:
    destinations, others = slots[:num_pairs], [0, *slots[num_pairs:]]
    sources = data.draw(st.lists(st.sampled_from(others), min_size=num_pairs, max_size=num_pairs))
    indices = [torch.tensor([*each, *[0] * num_padding], dtype=torch.int64) for each in (sources, destinations)]
    pool, expected = numbered_pool(), numbered_pool()
    copy_slots(SlotTable.of(tensors_of(pool)), *indices)
    expected.copy(*indices)
    assert_same_bytes(pool, expected)


@given(st.lists(st.integers(0, NUM_SLOTS), max_size=4))
@settings(max_examples=8, deadline=None)
def test_a_clear_is_the_pools(slots: list[int]) -> None:
    indices = torch.tensor(slots, dtype=torch.int64)
    pool, expected = numbered_pool(), numbered_pool()
    clear_slots(SlotTable.of(tensors_of(pool)), indices)
    expected.clear(indices)
    assert_same_bytes(pool, expected)


def test_a_table_lists_every_byte_of_a_slot_once() -> None:
    pool = numbered_pool()
    table = SlotTable.of(tensors_of(pool))
    spans = [(address, address + size) for address, _, size in table.chunks.tolist()]
    expected = [(tensor.data_ptr(), tensor.data_ptr() + tensor[0].nbytes) for tensor in tensors_of(pool)]
    for start, end in expected:
        own = sorted(span for span in spans if start <= span[0] < end)
        ends = [start, *(span[1] for span in own)]
        assert [span[0] for span in own] == ends[:-1]
        assert ends[-1] == end
    assert len(spans) == 1 + 1 + 1 + 2 + 2 + 1


def test_a_pool_without_tensors_does_nothing() -> None:
    table = SlotTable.of([])
    copy_slots(table, torch.tensor([1]), torch.tensor([2]))
    clear_slots(table, torch.tensor([1]))


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        SlotTable.of([torch.zeros(4, 6)[:, :3]])


def test_the_schemas_name_what_changes() -> None:
    table = SlotTable.of(tensors_of(numbered_pool()))
    slots = torch.tensor([1, 2])
    for name, indices in (("copy_slots", (slots, slots + 2)), ("clear_slots", (slots,))):
        operator = getattr(torch.ops.hybrid_runtime, name).default
        # opcheck does not look into lists
        tensors, *others = operator._schema.arguments
        assert tensors.alias_info.is_write
        assert not any(argument.alias_info for argument in others)
        torch.library.opcheck(operator, (list(table.tensors), table.chunks, *indices), test_utils="test_schema")

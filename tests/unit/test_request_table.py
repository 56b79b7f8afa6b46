"""Rows of the request table, and the log of what was written to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.memory.request_table import RequestTable


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_every_row_but_the_padding_row_is_handed_out_once():
    table = RequestTable(3, 4)
    assert table.slots.shape == (4, 4)
    assert table.slots.dtype == np.int32
    assert table.num_free_rows == 3
    assert sorted(table.allocate_row() for _ in range(3)) == [1, 2, 3]
    assert table.num_free_rows == 0
    with pytest.raises(PoolExhausted, match="all 3 rows"):
        table.allocate_row()
    assert table.num_free_rows == 0


def test_a_released_row_can_be_had_again():
    table = RequestTable(2, 4)
    first, second = table.allocate_row(), table.allocate_row()
    table.release_row(first)
    assert table.num_free_rows == 1
    assert table.allocate_row() == first
    table.release_row(second)
    assert table.allocate_row() == second


@pytest.mark.parametrize("row", [-1, 0, 1, 3, 4])
def test_only_a_row_that_is_taken_can_be_released(row):
    table = RequestTable(3, 4)
    taken = [table.allocate_row() for _ in range(3)]
    for released in (1, 3):
        table.release_row(released)
    with pytest.raises(ValueError, match=f"row {row} is not allocated"):
        table.release_row(row)
    assert table.num_free_rows == 2
    assert set(taken) == {1, 2, 3}


def test_writes_land_where_they_are_said_to_and_are_logged_once():
    table = RequestTable(2, 5)
    table.write(1, 0, ints(7, 8))
    table.write(2, 3, ints(9, 10))
    table.write(1, 2, ints())
    assert table.slots.tolist() == [[0] * 5, [7, 8, 0, 0, 0], [0, 0, 0, 9, 10]]
    assert written(table) == {(1, 0): 7, (1, 1): 8, (2, 3): 9, (2, 4): 10}
    assert written(table) == {}
    table.write(1, 1, ints(5))
    table.write(1, 1, ints(6))
    assert written(table) == {(1, 1): 6}


def test_one_slot_of_each_of_several_rows():
    table = RequestTable(3, 5)
    table.write_each([3, 1], [4, 0], ints(7, 8))
    assert written(table) == {(3, 4): 7, (1, 0): 8}
    with pytest.raises(IndexError):
        table.write_each([3, 1], [5, 1], ints(9, 10))
    assert written(table) == {}
    assert np.flatnonzero(table.slots).tolist() == [5, 19]


def test_a_write_beyond_the_row_is_refused_and_not_logged():
    table = RequestTable(1, 3)
    with pytest.raises(ValueError, match="broadcast"):
        table.write(1, 2, ints(4, 5))
    assert not table.slots.any()
    assert written(table) == {}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.lists(st.integers(1, 99), max_size=4)), max_size=12))
def test_a_mirror_that_follows_the_log_equals_the_table(writes):
    table, mirror = RequestTable(3, 9), np.zeros((4, 9), dtype=np.int32)
    for number, (row, start, slots) in enumerate(writes):
        table.write(row, start, ints(*slots))
        if number % 3 == 0:
            follow(table, mirror)
    follow(table, mirror)
    np.testing.assert_array_equal(mirror, table.slots)
    assert not table.slots[0].any()


def test_what_a_device_reads_in_place_is_not_handed_out():
    table = RequestTable(1, 3)
    table.write(1, 0, ints(4))
    table.forget_writes()
    assert written(table) == {}


def test_what_was_handed_out_does_not_change_any_more():
    table = RequestTable(1, 3)
    table.write(1, 0, ints(4))
    entries = table.take_writes()
    assert entries is not None
    table.write(1, 0, ints(5))
    assert entries.slots.tolist() == [4]


def written(table):
    entries = table.take_writes()
    if entries is None:
        return {}
    rows, positions = np.divmod(entries.places, table.slots.shape[1])
    return dict(zip(zip(rows.tolist(), positions.tolist(), strict=True), entries.slots.tolist(), strict=True))


def follow(table, mirror):
    entries = table.take_writes()
    if entries is not None:
        mirror.reshape(-1)[entries.places] = entries.slots

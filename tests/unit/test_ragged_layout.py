"""The ragged layout against a construction token by token.

Shapes: L tokens of the flat axis, S sequences, C chunks, Q tokens of a chunk, J chunks of the longest sequence,
R requested states.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for


@dataclass(frozen=True)
class Grid:
    """Flat token indices of every chunk, the chunks of every sequence, and (sequence, length, chunk) of every state."""

    chunks: list[list[int]]
    sequence_chunks: list[list[int]]
    states: list[tuple[int, int, int]]


def naive_grid(lengths: list[int], positions: list[list[int]], chunk_size: int) -> Grid:
    grid = Grid([], [], [])
    first = 0
    for sequence, (length, wanted) in enumerate(zip(lengths, positions, strict=True)):
        own: list[int] = []
        for offset in range(length):
            # A token opens a chunk at the front, behind a requested state, and where the chunk is full.
            if offset == 0 or offset in wanted or len(grid.chunks[-1]) == chunk_size:
                own.append(len(grid.chunks))
                grid.chunks.append([])
            grid.chunks[-1].append(first + offset)
            grid.states.extend((sequence, offset + 1, own[-1]) for position in wanted if position == offset + 1)
        grid.sequence_chunks.append(own)
        first += length
    return grid


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int, int]:
    """Lengths, positions (some twice), chunk size, padding."""
    lengths = draw(st.lists(st.integers(1, 20), max_size=5))
    positions = [sorted(draw(st.lists(st.integers(1, length), max_size=4))) for length in lengths]
    return lengths, positions, draw(st.integers(1, 9)), draw(st.integers(0, 5))


@given(cases())
@example(([], [], 4, 3))
@example(([1], [[]], 1, 0))
@example(([8, 4], [[4, 4, 8], [4]], 4, 2))
def test_equals_the_naive_construction(case):
    lengths, positions, chunk_size, padding = case
    total = sum(lengths)
    num_tokens = total + padding
    layout = RaggedLayout.build(lengths, positions, num_tokens=num_tokens, chunk_size=chunk_size)
    grid = naive_grid(lengths, positions, chunk_size)
    num_chunks = len(grid.chunks)

    assert layout.lengths == tuple(lengths)
    assert layout.starts == tuple(sum(lengths[:s]) for s in range(len(lengths)))
    assert (layout.num_tokens, layout.chunk_size) == (num_tokens, chunk_size)

    assert layout.chunk_tokens_CQ.shape == layout.chunk_mask_CQ.shape == (num_chunks, chunk_size)
    padded = [chunk + [num_tokens] * (chunk_size - len(chunk)) for chunk in grid.chunks]
    assert layout.chunk_tokens_CQ.tolist() == padded
    assert layout.chunk_mask_CQ.tolist() == [[token < num_tokens for token in chunk] for chunk in padded]

    places = {token: c * chunk_size + q for c, chunk in enumerate(grid.chunks) for q, token in enumerate(chunk)}
    assert layout.token_place_L.tolist() == [places.get(token, num_chunks * chunk_size) for token in range(num_tokens)]

    longest = max(map(len, grid.sequence_chunks), default=0)
    assert layout.sequence_chunks_SJ.shape == (len(lengths), longest)
    assert layout.sequence_chunks_SJ.tolist() == [
        own + [num_chunks] * (longest - len(own)) for own in grid.sequence_chunks
    ]

    owners = [(s, offset) for s, length in enumerate(lengths) for offset in range(length)]
    owners += [(len(lengths), 0)] * padding
    assert list(zip(layout.token_sequence_L.tolist(), layout.token_offset_L.tolist(), strict=True)) == owners

    states = zip(
        layout.state_sequence_R.tolist(), layout.state_length_R.tolist(), layout.state_chunk_R.tolist(), strict=True
    )
    assert list(states) == grid.states
    assert [state[:2] for state in grid.states] == [(s, p) for s, wanted in enumerate(positions) for p in wanted]


@given(cases())
def test_every_state_stands_at_the_end_of_its_chunk(case):
    lengths, positions, chunk_size, padding = case
    layout = RaggedLayout.build(lengths, positions, num_tokens=sum(lengths) + padding, chunk_size=chunk_size)
    last_tokens_C = [
        row[mask][-1].item() for row, mask in zip(layout.chunk_tokens_CQ, layout.chunk_mask_CQ, strict=True)
    ]
    for sequence, length, chunk in zip(
        layout.state_sequence_R.tolist(), layout.state_length_R.tolist(), layout.state_chunk_R.tolist(), strict=True
    ):
        assert last_tokens_C[chunk] == layout.starts[sequence] + length - 1
        assert chunk in layout.sequence_chunks_SJ[sequence].tolist()


@given(cases(), st.sampled_from([(), (3,), (2, 2)]))
def test_to_chunks_and_back_keeps_tokens_and_zeroes_padding(case, shape):
    lengths, positions, chunk_size, padding = case
    total = sum(lengths)
    layout = RaggedLayout.build(lengths, positions, num_tokens=total + padding, chunk_size=chunk_size)
    x_L = torch.arange(1.0, (total + padding) * torch.Size(shape).numel() + 1).reshape(total + padding, *shape)
    x_CQ = layout.to_chunks(x_L)
    assert x_CQ.shape == (len(layout.chunk_mask_CQ), chunk_size, *shape)
    assert not x_CQ[~layout.chunk_mask_CQ].any()
    assert x_CQ[layout.chunk_mask_CQ].equal(x_L[:total])  # chunks lie in the order of their tokens
    back_L = layout.from_chunks(x_CQ)
    assert back_L[:total].equal(x_L[:total])
    assert back_L.shape == x_L.shape
    assert not back_L[total:].any()


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_without_positions_the_end_of_each_sequence_is_asked_for(lengths):
    layout = RaggedLayout.build(lengths)
    explicit = RaggedLayout.build(lengths, [[length] for length in lengths])
    assert layout.num_tokens == sum(lengths)
    assert layout.state_length_R.tolist() == lengths
    assert layout.state_chunk_R.equal(explicit.state_chunk_R)
    assert layout.chunk_tokens_CQ.equal(explicit.chunk_tokens_CQ)


def test_index_tensors_are_int64_and_masks_bool():
    layout = RaggedLayout.build([3, 1], [[2], []], num_tokens=6, chunk_size=2)
    for name, value in vars(layout).items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == (torch.bool if "mask" in name else torch.int64), name


@pytest.mark.parametrize(
    ("lengths", "positions", "num_tokens", "message"),
    [
        ([3, 0], None, None, "sequence 1 has length 0"),
        ([3, -1], [[], []], 4, "sequence 1 has length -1"),
        ([3], [[0]], None, r"\[0\] are not ascending in 1..3"),
        ([3], [[4]], None, r"\[4\] are not ascending in 1..3"),
        ([3], [[3, 1]], None, r"\[3, 1\] are not ascending in 1..3"),
        ([3], [[-1, 2]], None, r"\[-1, 2\] are not ascending in 1..3"),
        ([3, 2], [[1]], None, "1 lists of state positions for 2 sequences"),
        ([3, 2], None, 4, "num_tokens=4 is less than the 5 tokens"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(lengths, positions, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        RaggedLayout.build(lengths, positions, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.float64, torch.bfloat16], torch.float64),
    ],
)
def test_state_arithmetic_is_float32_or_wider(dtypes, expected):
    assert state_dtype_for(*(torch.zeros(1, dtype=dtype) for dtype in dtypes)) == expected

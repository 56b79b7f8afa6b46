"""How a flat token axis is cut into sequences, and sequences into chunks.

Shapes: L tokens of the flat axis, S sequences, C chunks, Q tokens of a chunk, J chunks of the longest sequence,
R requested states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_CHUNK_SIZE = 64


@dataclass(frozen=True)
class RaggedLayout:
    """Cuts a flat axis of L tokens into S sequences, and each sequence into chunks of at most Q tokens.

    A chunk ends at every requested state position, so that the state at a position is the state at the end of a
    chunk and one pass yields all of them. Tokens behind the last sequence are padding: they belong to no chunk.

    All fields are int64 tensors (masks: bool), the first two on the host, the others on one device: no size or length
    is a Python number that a compiler would take for a constant.
    """

    lengths_S: Tensor  # tokens of each sequence; host
    starts_S: Tensor  # index of each sequence's first token on the flat axis; host
    token_sequence_L: Tensor  # sequence of each token; padding tokens: S
    token_offset_L: Tensor  # position of each token inside its sequence; padding tokens: 0
    chunk_tokens_CQ: Tensor  # flat index of each token of each chunk; padding: L
    chunk_mask_CQ: Tensor  # True where chunk_tokens_CQ names a token
    token_place_L: Tensor  # index of each token in the flattened [C, Q]; padding tokens: C * Q
    sequence_chunks_SJ: Tensor  # j-th chunk of each sequence; padding: C
    state_sequence_R: Tensor  # sequence of each requested state
    state_length_R: Tensor  # tokens of that sequence (of this pass) that the state covers
    state_chunk_R: Tensor  # chunk at whose end that state stands

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        state_positions: Sequence[Sequence[int]] | None = None,
        *,
        num_tokens: int | None = None,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        device: torch.device | str = "cpu",
    ) -> RaggedLayout:
        """Layout of sequences of the given `lengths`, laid one behind the other from index 0.

        `state_positions[s]`: ascending token counts in `1..lengths[s]` after which the state of sequence s is wanted;
        the requested states are numbered in this order, sequence by sequence; a position named twice is returned
        twice (for two destinations). None asks for the state at the end of every sequence. `num_tokens` (default: the
        sum of lengths) may be larger, for padding.

        Raises ValueError for a length below 1, a position out of order or range, or a `num_tokens` that is too small.
        """
        if state_positions is None:
            state_positions = [[length] for length in lengths]
        if len(state_positions) != len(lengths):
            raise ValueError(f"{len(state_positions)} lists of state positions for {len(lengths)} sequences")
        total = sum(lengths)
        num_tokens = total if num_tokens is None else num_tokens
        if num_tokens < total:
            raise ValueError(f"num_tokens={num_tokens} is less than the {total} tokens of all sequences")

        starts: list[int] = []
        chunks: list[tuple[int, int]] = []  # first token and number of tokens
        sequence_chunks: list[list[int]] = []
        state_sequence: list[int] = []
        state_length: list[int] = []
        state_chunk: list[int] = []
        start = 0
        for sequence, (length, positions) in enumerate(zip(lengths, state_positions, strict=True)):
            if length < 1:
                raise ValueError(f"sequence {sequence} has length {length}; it must be at least 1")
            if list(positions) != sorted(positions) or (positions and not 1 <= positions[0] <= positions[-1] <= length):
                raise ValueError(f"state positions {list(positions)} are not ascending in 1..{length}")
            starts.append(start)
            own: list[int] = []
            begin = 0
            for end in [*positions, *([] if positions and positions[-1] == length else [length])]:
                while begin < end:
                    size = min(chunk_size, end - begin)
                    own.append(len(chunks))
                    chunks.append((start + begin, size))
                    begin += size
                if end in positions:
                    state_sequence.append(sequence)
                    state_length.append(end)
                    state_chunk.append(len(chunks) - 1)
            sequence_chunks.append(own)
            start += length

        def tensor(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        num_chunks = len(chunks)
        first_C1 = tensor([begin for begin, _ in chunks]).reshape(-1, 1)
        size_C1 = tensor([size for _, size in chunks]).reshape(-1, 1)
        within_Q = torch.arange(chunk_size, device=device)
        mask_CQ = within_Q < size_C1
        chunk_tokens_CQ = torch.where(mask_CQ, first_C1 + within_Q, num_tokens)
        token_place_L = torch.full((num_tokens,), num_chunks * chunk_size, dtype=torch.int64, device=device)
        token_place_L[chunk_tokens_CQ[mask_CQ]] = torch.arange(num_chunks * chunk_size, device=device).reshape(
            num_chunks, chunk_size
        )[mask_CQ]
        longest = max((len(own) for own in sequence_chunks), default=0)
        token_sequence_L = torch.full((num_tokens,), len(lengths), dtype=torch.int64, device=device)
        token_offset_L = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        if total:
            lengths_S = tensor(list(lengths))
            token_sequence_L[:total] = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths_S)
            token_offset_L[:total] = torch.arange(total, device=device) - torch.repeat_interleave(
                tensor(starts), lengths_S
            )
        return cls(
            lengths_S=torch.tensor(lengths, dtype=torch.int64),
            starts_S=torch.tensor(starts, dtype=torch.int64),
            token_sequence_L=token_sequence_L,
            token_offset_L=token_offset_L,
            chunk_tokens_CQ=chunk_tokens_CQ,
            chunk_mask_CQ=mask_CQ,
            token_place_L=token_place_L,
            sequence_chunks_SJ=tensor([own + [num_chunks] * (longest - len(own)) for own in sequence_chunks]).reshape(
                len(lengths), longest
            ),
            state_sequence_R=tensor(state_sequence),
            state_length_R=tensor(state_length),
            state_chunk_R=tensor(state_chunk),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """[S] tokens of each sequence."""
        return tuple(self.lengths_S.tolist())

    @property
    def starts(self) -> tuple[int, ...]:
        """[S] index of each sequence's first token on the flat axis."""
        return tuple(self.starts_S.tolist())

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.lengths_S.shape[0]

    @property
    def num_tokens(self) -> int:
        """L, padding included."""
        return self.token_sequence_L.shape[0]

    @property
    def chunk_size(self) -> int:
        """Q."""
        return self.chunk_tokens_CQ.shape[1]

    def to_chunks(self, x_L: Tensor) -> Tensor:
        """`[L, ...]` to `[C, Q, ...]`; places without a token are zero."""
        padded = torch.cat([x_L, x_L.new_zeros(1, *x_L.shape[1:])])
        return padded[self.chunk_tokens_CQ]

    def from_chunks(self, x_CQ: Tensor) -> Tensor:
        """`[C, Q, ...]` back to `[L, ...]`; padding tokens are zero."""
        flat = x_CQ.flatten(0, 1)
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self.token_place_L]


def state_dtype_for(*tensors: Tensor) -> torch.dtype:
    """The dtype of state arithmetic: float32, or float64 where an operand is float64."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype

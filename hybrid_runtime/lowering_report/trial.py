"""A small decode step on the CPU, to be run on different data: whatever differs between the runs, a graph would freeze.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_runtime.graphs.lowering.step import Trial
from hybrid_runtime.graphs.step_inputs import DecodeInputs, StepMemory
from hybrid_runtime.lowering_report.models import build_model
from hybrid_runtime.memory.pools import Pool

_BATCH, _CONTEXT, _SLOTS = 3, 16, 48


def decode_trial(architecture: str) -> Trial:
    """Decode of a small model: full rows of random lengths first, then one row beside padding."""
    model = build_model(architecture, "cpu", torch.float32, small=True)
    kv, state = Pool(model.kv_layers(), _SLOTS), Pool(model.state_layers(), _SLOTS)
    memory = StepMemory(kv.layers, state.layers, torch.zeros(_BATCH + 1, _CONTEXT, dtype=torch.int32))
    inputs = DecodeInputs(
        token_ids_B=_zeros(),
        positions_B=_zeros(),
        kv_slots_B=_zeros(),
        request_rows_B=_zeros(),
        context_lens_B=_zeros(),
        max_context_len=_CONTEXT,
        working_slots_B=_zeros(),
    )
    pools = [tensor for layer in (*kv.layers, *state.layers) for tensor in layer.values()]
    static = [*vars(inputs).values(), memory.req_to_token, *pools]
    tensors = [value for value in static if isinstance(value, Tensor)]
    return Trial(
        function=lambda: model.decode(inputs, memory).argmax(-1),
        static=tensors,
        fills=[_fill(inputs, memory, pools, num_rows=num_rows, seed=num_rows) for num_rows in (_BATCH, 1)],
    )


def _zeros() -> Tensor:
    return torch.zeros(_BATCH, dtype=torch.int64)


def _fill(
    inputs: DecodeInputs, memory: StepMemory, pools: list[Tensor], *, num_rows: int, seed: int
) -> Callable[[], None]:
    """What writes `num_rows` requests, and padding for the other rows, into the static tensors."""

    def fill() -> None:
        generator = torch.Generator().manual_seed(seed)

        def distinct(limit: int) -> Tensor:
            return 1 + torch.randperm(limit - 1, generator=generator)

        for pool in pools:
            pool.normal_(generator=generator)
        memory.req_to_token.copy_(distinct(_SLOTS + 1)[:_CONTEXT].expand_as(memory.req_to_token))
        is_padding_B = torch.arange(_BATCH) >= num_rows
        context_lens_B = torch.randint(1, _CONTEXT + 1, (_BATCH,), generator=generator)
        inputs.token_ids_B.random_(0, 64, generator=generator)
        inputs.context_lens_B.copy_(context_lens_B.masked_fill(is_padding_B, 1))
        inputs.positions_B.copy_(inputs.context_lens_B - 1)
        inputs.kv_slots_B.copy_(distinct(_SLOTS + 1)[:_BATCH].masked_fill(is_padding_B, 0))
        inputs.request_rows_B.copy_(torch.arange(1, _BATCH + 1).masked_fill(is_padding_B, 0))
        inputs.working_slots_B.copy_(distinct(_SLOTS + 1)[:_BATCH].masked_fill(is_padding_B, 0))

    return fill

"""Forms as operators that a compiler takes as they are, so that one compiled prefill or verify serves every batch.

These forms loop over chunks, sequences or nodes on the host, or take sizes from the device. Traced, each loop would be
unrolled for one batch; as an operator (namespace `hybrid_runtime`) it runs as the PyTorch form it is, with any sizes,
inside a graph that is compiled once.

Shapes: as in the PyTorch forms' files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from hybrid_runtime.ops import attention, gdn, kda, mamba2, moe
from hybrid_runtime.ops.ragged import RaggedLayout, state_dtype_for

_library = torch.library.Library("hybrid_runtime", "FRAGMENT")
_ops = torch.ops.hybrid_runtime
_FIELDS = tuple(field.name for field in dataclasses.fields(RaggedLayout))


def mamba2_chunked(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, h0_SHPN: Tensor, layout: RaggedLayout
) -> tuple[Tensor, Tensor]:
    """`ops.mamba2.mamba2_chunked`."""
    return _ops.mamba2_chunked([x_LHP, dt_LH, a_H, b_LGN, c_LGN, h0_SHPN], _fields(layout))


def gdn_chunked(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LH: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """`ops.gdn.gdn_chunked`."""
    return _ops.gdn_chunked([v_LHV, q_LGK, k_LGK, log_a_LH, beta_LH, s0_SHVK], _fields(layout))


def kda_chunked(
    q_LGK: Tensor,
    k_LGK: Tensor,
    v_LHV: Tensor,
    log_a_LHK: Tensor,
    beta_LH: Tensor,
    s0_SHVK: Tensor,
    layout: RaggedLayout,
) -> tuple[Tensor, Tensor]:
    """`ops.kda.kda_chunked`."""
    return _ops.kda_chunked([v_LHV, q_LGK, k_LGK, log_a_LHK, beta_LH, s0_SHVK], _fields(layout))


def prefill_attention(
    q_LHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    layout: RaggedLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`ops.attention.prefill_attention`."""
    return _ops.prefill_attention(
        q_LHD, k_pool, v_pool, req_to_token, request_rows_S, context_lens_S, _fields(layout), scale, window
    )


def prefill_mla(
    q_nope_LHD: Tensor,
    q_rope_LHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    layout: RaggedLayout,
    *,
    scale: float,
) -> Tensor:
    """`ops.attention.prefill_mla`."""
    weights = (w_k_HDR, w_v_HVR)
    return _ops.prefill_mla(
        q_nope_LHD,
        q_rope_LHE,
        latent_pool,
        *weights,
        req_to_token,
        request_rows_S,
        context_lens_S,
        _fields(layout),
        scale,
    )


def moe_feed_forward(
    x_LD: Tensor,
    expert_ids_LK: Tensor,
    expert_weights_LK: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """`ops.moe.moe_feed_forward`, for `activation=silu`. Raises ValueError for another."""
    if activation is not silu:
        raise ValueError(f"activation must be silu, not {activation!r}")
    return _ops.moe_feed_forward(x_LD, expert_ids_LK, expert_weights_LK, gate_up_weight, down_weight)


def _fields(layout: RaggedLayout) -> list[Tensor]:
    return [getattr(layout, name) for name in _FIELDS]


def _define(schema: str, run: Callable[..., object], shapes: Callable[..., object]) -> None:
    """An operator for every device: `run` computes it, `shapes` makes empty results for a compiler."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybrid_runtime::{name}", shapes, lib=_library)


def _define_chunked(name: str, form: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """A recurrent form: its output is as the first operand, its states as the last, the initial states."""

    def run(operands: Sequence[Tensor], fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        y, states = form(*operands, RaggedLayout(*fields))
        return y.contiguous(), states.contiguous()

    def shapes(operands: Sequence[Tensor], fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        num_states = RaggedLayout(*fields).state_chunk_R.shape[0]
        y, initial = operands[0].new_empty(operands[0].shape), operands[-1]
        return y, initial.new_empty(num_states, *initial.shape[1:], dtype=state_dtype_for(*operands))

    _define(f"{name}(Tensor[] operands, Tensor[] layout) -> (Tensor, Tensor)", run, shapes)


def _value_first(form: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A delta rule with its value, which its output is as, in the first place."""
    return lambda value, query, key, *others: form(query, key, value, *others)


def _prefill_attention(
    q_LHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    fields: Sequence[Tensor],
    scale: float,
    window: int | None,
) -> Tensor:
    layout, table = RaggedLayout(*fields), (req_to_token, request_rows_S, context_lens_S)
    return attention.prefill_attention(q_LHD, k_pool, v_pool, *table, layout, scale=scale, window=window).contiguous()


def _prefill_mla(
    q_nope_LHD: Tensor,
    q_rope_LHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_S: Tensor,
    context_lens_S: Tensor,
    fields: Sequence[Tensor],
    scale: float,
) -> Tensor:
    layout, table = RaggedLayout(*fields), (req_to_token, request_rows_S, context_lens_S)
    return attention.prefill_mla(
        q_nope_LHD, q_rope_LHE, latent_pool, w_k_HDR, w_v_HVR, *table, layout, scale=scale
    ).contiguous()


def _moe_feed_forward(
    x_LD: Tensor, expert_ids_LK: Tensor, expert_weights_LK: Tensor, gate_up_weight: Tensor, down_weight: Tensor
) -> Tensor:
    return moe.moe_feed_forward(x_LD, expert_ids_LK, expert_weights_LK, gate_up_weight, down_weight, silu).contiguous()


_define_chunked("mamba2_chunked", mamba2.mamba2_chunked)
_define_chunked("gdn_chunked", _value_first(gdn.gdn_chunked))
_define_chunked("kda_chunked", _value_first(kda.kda_chunked))
_define(
    "prefill_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor request_rows, "
    "Tensor context_lens, Tensor[] layout, float scale, int? window) -> Tensor",
    _prefill_attention,
    lambda q_LHD, k_pool, v_pool, *others: q_LHD.new_empty(*q_LHD.shape[:2], v_pool.shape[-1]),
)
_define(
    "prefill_mla(Tensor q_nope, Tensor q_rope, Tensor latent_pool, Tensor w_k, Tensor w_v, Tensor req_to_token, "
    "Tensor request_rows, Tensor context_lens, Tensor[] layout, float scale) -> Tensor",
    _prefill_mla,
    lambda q_nope_LHD, q_rope_LHE, latent_pool, w_k_HDR, w_v_HVR, *others: q_nope_LHD.new_empty(
        *q_nope_LHD.shape[:2], w_v_HVR.shape[1]
    ),
)
_define(
    "moe_feed_forward(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down) -> Tensor",
    _moe_feed_forward,
    lambda x_LD, *others: x_LD.new_empty(x_LD.shape),
)

"""Forms over draft trees as operators that a compiler takes as they are (see `ops.opaque`).

Shapes: as in the PyTorch forms' files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_runtime.ops import gdn_tree as gdn
from hybrid_runtime.ops import kda_tree as kda
from hybrid_runtime.ops import mamba2_tree as mamba2
from hybrid_runtime.ops import tree_attention as attention
from hybrid_runtime.ops.draft_tree import DraftTree
from hybrid_runtime.ops.ragged import state_dtype_for

_library = torch.library.Library("hybrid_runtime", "FRAGMENT")
_ops = torch.ops.hybrid_runtime


def mamba2_tree(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
) -> Tensor:
    """`ops.mamba2_tree.mamba2_tree`."""
    return _ops.mamba2_tree([x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, state_pool, slots_B], list(tree))


def gdn_tree(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
) -> tuple[Tensor, Tensor]:
    """`ops.gdn_tree.gdn_tree`."""
    return _ops.gdn_tree([q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool, slots_B], list(tree))


def kda_tree(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTHK: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
) -> tuple[Tensor, Tensor]:
    """`ops.kda_tree.kda_tree`."""
    return _ops.kda_tree([q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH, state_pool, slots_B], list(tree))


def mamba2_tree_states(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
    node_states: Tensor,
) -> Tensor:
    """`ops.mamba2_tree.mamba2_tree_states`."""
    operands = [x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, state_pool, slots_B]
    return _ops.mamba2_tree_states(operands, list(tree), node_states)


def gdn_tree_states(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTH: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
    node_states: Tensor,
) -> Tensor:
    """`ops.gdn_tree.gdn_tree_states`."""
    operands = [q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool, slots_B]
    return _ops.gdn_tree_states(operands, list(tree), node_states)


def kda_tree_states(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTHK: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    tree: DraftTree,
    node_states: Tensor,
) -> Tensor:
    """`ops.kda_tree.kda_tree_states`."""
    operands = [q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH, state_pool, slots_B]
    return _ops.kda_tree_states(operands, list(tree), node_states)


def tree_attention(
    q_BTHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    kv_slots_BT: Tensor,
    tree: DraftTree,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`ops.tree_attention.tree_attention`; `max_context_len` is taken from the lengths, and waits for them."""
    table = (req_to_token, request_rows_B, committed_lens_B, kv_slots_BT)
    return _ops.tree_attention(q_BTHD, k_pool, v_pool, *table, list(tree), scale, window)


def tree_mla(
    q_nope_BTHD: Tensor,
    q_rope_BTHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    max_context_len: int,
    kv_slots_BT: Tensor,
    tree: DraftTree,
    *,
    scale: float,
) -> Tensor:
    """`ops.tree_attention.tree_mla`; `max_context_len` is taken from the lengths, and waits for them."""
    weights, table = (w_k_HDR, w_v_HVR), (req_to_token, request_rows_B, committed_lens_B, kv_slots_BT)
    return _ops.tree_mla(q_nope_BTHD, q_rope_BTHE, latent_pool, *weights, *table, list(tree), scale)


def _define(schema: str, run: Callable[..., object], shapes: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybrid_runtime::{name}", shapes, lib=_library)


def _define_tree(name: str, form: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """A delta rule: outputs like the value, u in state arithmetic."""

    def run(operands: Sequence[Tensor], tree: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        y_BTHV, u_BTHV = form(*operands, DraftTree(*tree))
        return y_BTHV.contiguous(), u_BTHV.contiguous()

    def shapes(operands: Sequence[Tensor], tree: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        v_BTHV = operands[2]
        return v_BTHV.new_empty(v_BTHV.shape), v_BTHV.new_empty(v_BTHV.shape, dtype=state_dtype_for(*operands[:6]))

    _define(f"{name}(Tensor[] operands, Tensor[] tree) -> (Tensor, Tensor)", run, shapes)


def _define_states(name: str, form: Callable[..., Tensor], output_like: int) -> None:
    """A walk node by node: outputs like one of the operands."""

    def run(operands: Sequence[Tensor], tree: Sequence[Tensor], node_states: Tensor) -> Tensor:
        return form(*operands, DraftTree(*tree), node_states).contiguous()

    def shapes(operands: Sequence[Tensor], tree: Sequence[Tensor], node_states: Tensor) -> Tensor:
        return operands[output_like].new_empty(operands[output_like].shape)

    _define(f"{name}(Tensor[] operands, Tensor[] tree, Tensor(a!) node_states) -> Tensor", run, shapes)


def _mamba2_tree(operands: Sequence[Tensor], tree: Sequence[Tensor]) -> Tensor:
    x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, pool, slots_B = operands
    return mamba2.mamba2_tree(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, pool, slots_B, DraftTree(*tree)).contiguous()


def _max_context_len(committed_lens_B: Tensor) -> int:
    return max(1, int(committed_lens_B.max()))


def _tree_attention(
    q_BTHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    kv_slots_BT: Tensor,
    tree: Sequence[Tensor],
    scale: float,
    window: int | None,
) -> Tensor:
    table = (req_to_token, request_rows_B, committed_lens_B, _max_context_len(committed_lens_B), kv_slots_BT)
    y_BTHV = attention.tree_attention(q_BTHD, k_pool, v_pool, *table, DraftTree(*tree), scale=scale, window=window)
    return y_BTHV.contiguous()


def _tree_mla(
    q_nope_BTHD: Tensor,
    q_rope_BTHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    kv_slots_BT: Tensor,
    tree: Sequence[Tensor],
    scale: float,
) -> Tensor:
    y_BTHV = attention.tree_mla(
        q_nope_BTHD,
        q_rope_BTHE,
        latent_pool,
        w_k_HDR,
        w_v_HVR,
        req_to_token,
        request_rows_B,
        committed_lens_B,
        _max_context_len(committed_lens_B),
        kv_slots_BT,
        DraftTree(*tree),
        scale=scale,
    )
    return y_BTHV.contiguous()


_define(
    "mamba2_tree(Tensor[] operands, Tensor[] tree) -> Tensor",
    _mamba2_tree,
    lambda operands, tree: operands[0].new_empty(operands[0].shape),
)
_define_tree("gdn_tree", gdn.gdn_tree)
_define_tree("kda_tree", kda.kda_tree)
_define_states("mamba2_tree_states", mamba2.mamba2_tree_states, 0)
_define_states("gdn_tree_states", gdn.gdn_tree_states, 2)
_define_states("kda_tree_states", kda.kda_tree_states, 2)
_define(
    "tree_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor request_rows, "
    "Tensor committed_lens, Tensor kv_slots, Tensor[] tree, float scale, int? window) -> Tensor",
    _tree_attention,
    lambda q_BTHD, k_pool, v_pool, *others: q_BTHD.new_empty(*q_BTHD.shape[:3], v_pool.shape[-1]),
)
_define(
    "tree_mla(Tensor q_nope, Tensor q_rope, Tensor latent_pool, Tensor w_k, Tensor w_v, Tensor req_to_token, "
    "Tensor request_rows, Tensor committed_lens, Tensor kv_slots, Tensor[] tree, float scale) -> Tensor",
    _tree_mla,
    lambda q_nope_BTHD, q_rope_BTHE, latent_pool, w_k_HDR, w_v_HVR, *others: q_nope_BTHD.new_empty(
        *q_nope_BTHD.shape[:3], w_v_HVR.shape[1]
    ),
)

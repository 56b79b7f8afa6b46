"""The twins of the operations over draft trees, with the signatures of the PyTorch forms. What is not bfloat16 or
float32 goes to those.

Trees are told by their parents alone. Rows of slot 0 are skipped: their outputs are zero. Other than the PyTorch forms,
these refuse with ValueError what is no tree, no path, and destinations that rows would have to share.

Shapes: as in the PyTorch forms' files.
"""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from hybrid_runtime.ops import conv_tree as conv
from hybrid_runtime.ops import gdn_tree as gdn
from hybrid_runtime.ops import kda_tree as kda
from hybrid_runtime.ops import mamba2_tree as mamba2
from hybrid_runtime.ops import opaque_trees
from hybrid_runtime.ops.cpu_kernels import tree_schemas  # noqa: F401 (defines the operators)
from hybrid_runtime.ops.cpu_kernels.tree_build import ensure_trees_built
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree

_NARROW = {torch.bfloat16, torch.float32}
_NO_WINDOW = 2**40  # more than any context
_ops = torch.ops.hybrid_runtime_cpu


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
    """As `ops.mamba2_tree.mamba2_tree`; each state is read once."""
    operands = (x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, state_pool)
    if not _are_narrow(*operands):
        return opaque_trees.mamba2_tree(*operands, slots_B, tree)
    _build_unless_traced()
    return _ops.mamba2_tree(*operands, slots_B, tree.parents_BT)


def mamba2_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    x_BTHP: Tensor,
    b_BTGN: Tensor,
    path: AcceptedPath,
) -> None:
    """As `ops.mamba2_tree.mamba2_fold`; each state is read once and written once."""
    operands = (dt_BTH, a_H, x_BTHP, b_BTGN)
    if not _are_narrow(state_pool, *operands):
        mamba2.mamba2_fold(state_pool, slots_B, destinations_B, *operands, path)
        return
    _build_unless_traced()
    _ops.mamba2_fold(state_pool, slots_B, destinations_B, *operands, *path)


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
    """As `ops.gdn_tree.gdn_tree`; each state is read once."""
    if not _are_narrow(q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool):
        return opaque_trees.gdn_tree(q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool, slots_B, tree)
    _build_unless_traced()
    operands = (q_BTGK, k_BTGK, v_BTHV, log_a_BTH[..., None], beta_BTH)
    return _ops.delta_tree(*operands, state_pool, slots_B, tree.parents_BT)


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
    """As `ops.kda_tree.kda_tree`; each state is read once."""
    operands = (q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH)
    if not _are_narrow(*operands, state_pool):
        return opaque_trees.kda_tree(*operands, state_pool, slots_B, tree)
    _build_unless_traced()
    return _ops.delta_tree(*operands, state_pool, slots_B, tree.parents_BT)


def gdn_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    k_BTGK: Tensor,
    u_BTHV: Tensor,
    log_a_BTH: Tensor,
    path: AcceptedPath,
) -> None:
    """As `ops.gdn_tree.gdn_fold`; each state is read once and written once."""
    if not _are_narrow(state_pool, k_BTGK, u_BTHV, log_a_BTH):
        gdn.gdn_fold(state_pool, slots_B, destinations_B, k_BTGK, u_BTHV, log_a_BTH, path)
        return
    _build_unless_traced()
    _ops.delta_fold(state_pool, slots_B, destinations_B, k_BTGK, u_BTHV, log_a_BTH[..., None], *path)


def kda_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    k_BTGK: Tensor,
    u_BTHV: Tensor,
    log_a_BTHK: Tensor,
    path: AcceptedPath,
) -> None:
    """As `ops.kda_tree.kda_fold`; each state is read once and written once."""
    operands = (k_BTGK, u_BTHV, log_a_BTHK)
    if not _are_narrow(state_pool, *operands):
        kda.kda_fold(state_pool, slots_B, destinations_B, *operands, path)
        return
    _build_unless_traced()
    _ops.delta_fold(state_pool, slots_B, destinations_B, *operands, *path)


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
    """As `ops.mamba2_tree.mamba2_tree_states`; the states of padding rows are left as they are."""
    operands = (x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, state_pool)
    if not _are_narrow(*operands) or node_states.dtype != state_pool.dtype:
        return opaque_trees.mamba2_tree_states(*operands, slots_B, tree, node_states)
    _build_unless_traced()
    return _ops.mamba2_tree_states(*operands, slots_B, tree.parents_BT, node_states)


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
    """As `ops.gdn_tree.gdn_tree_states`; the states of padding rows are left as they are."""
    operands = (q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool)
    if not _are_narrow(*operands) or node_states.dtype != state_pool.dtype:
        return opaque_trees.gdn_tree_states(*operands, slots_B, tree, node_states)
    _build_unless_traced()
    operands = (q_BTGK, k_BTGK, v_BTHV, log_a_BTH[..., None], beta_BTH, state_pool)
    return _ops.delta_tree_states(*operands, slots_B, tree.parents_BT, node_states)


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
    """As `ops.kda_tree.kda_tree_states`; the states of padding rows are left as they are."""
    operands = (q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH, state_pool)
    if not _are_narrow(*operands) or node_states.dtype != state_pool.dtype:
        return opaque_trees.kda_tree_states(*operands, slots_B, tree, node_states)
    _build_unless_traced()
    return _ops.delta_tree_states(*operands, slots_B, tree.parents_BT, node_states)


def conv_tree(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, window_pool: Tensor, slots_B: Tensor, tree: DraftTree
) -> Tensor:
    """As `ops.conv_tree.conv_tree`, to the same bits but for padding rows."""
    if window_pool.dtype != x_BTD.dtype or not _are_narrow(x_BTD, weight_DW, *([] if bias_D is None else [bias_D])):
        return conv.conv_tree(x_BTD, weight_DW, bias_D, window_pool, slots_B, tree)
    _build_unless_traced()
    return _ops.conv_tree(x_BTD, weight_DW, bias_D, window_pool, slots_B, tree.parents_BT)


def conv_fold(window_pool: Tensor, slots_B: Tensor, destinations_B: Tensor, x_BTD: Tensor, path: AcceptedPath) -> None:
    """As `ops.conv_tree.conv_fold`, to the same bits."""
    if window_pool.dtype != x_BTD.dtype or not _are_narrow(x_BTD):
        conv.conv_fold(window_pool, slots_B, destinations_B, x_BTD, path)
        return
    _build_unless_traced()
    _ops.conv_fold(window_pool, slots_B, destinations_B, x_BTD, *path)


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
    """As `ops.tree_attention.tree_attention`, over each row's own context: `max_context_len` is not used.

    Copies no keys or values but those of the places that are worked on. Products are in float32.
    """
    if k_pool.dtype != v_pool.dtype or not _are_narrow(q_BTHD, k_pool):
        return opaque_trees.tree_attention(
            q_BTHD,
            k_pool,
            v_pool,
            req_to_token,
            request_rows_B,
            committed_lens_B,
            max_context_len,
            kv_slots_BT,
            tree,
            scale=scale,
            window=window,
        )
    _build_unless_traced()
    return _ops.tree_attention(
        q_BTHD,
        k_pool,
        v_pool,
        req_to_token,
        request_rows_B,
        committed_lens_B,
        kv_slots_BT,
        tree.parents_BT,
        scale,
        _NO_WINDOW if window is None else window,
    )


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
    """As `ops.tree_attention.tree_mla`: the latent is the one key, and its first part the one value, of all heads."""
    q_latent_BTHR = einsum(q_nope_BTHD, w_k_HDR, "b t h d, h d r -> b t h r")
    o_BTHR = tree_attention(
        torch.cat([q_latent_BTHR, q_rope_BTHE], dim=-1),
        latent_pool[:, None],
        latent_pool[:, None, : w_k_HDR.shape[-1]],
        req_to_token,
        request_rows_B,
        committed_lens_B,
        max_context_len,
        kv_slots_BT,
        tree,
        scale=scale,
    )
    return einsum(o_BTHR, w_v_HVR, "b t h r, h v r -> b t h v")


def _are_narrow(*tensors: Tensor) -> bool:
    """Whether a kernel exists for these dtypes."""
    return {tensor.dtype for tensor in tensors} <= _NARROW


def _build_unless_traced() -> None:
    if not torch.compiler.is_compiling():
        ensure_trees_built()

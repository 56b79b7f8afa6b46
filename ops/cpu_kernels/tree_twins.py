"""The twins of the operations over draft trees, with the signatures of the PyTorch forms. What is not bfloat16 or
float32 goes to those.

Trees are told by their parents alone. Rows of slot 0 are skipped: their outputs are zero. Other than the PyTorch forms,
these refuse with ValueError what is no tree, no path, and destinations that rows would have to share.

Shapes: as in the PyTorch forms' files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.ops import gdn_tree as gdn
from hybrid_runtime.ops import kda_tree as kda
from hybrid_runtime.ops import mamba2_tree as mamba2
from hybrid_runtime.ops.cpu_kernels import tree_schemas  # noqa: F401 (defines the operators)
from hybrid_runtime.ops.cpu_kernels.tree_build import ensure_trees_built
from hybrid_runtime.ops.draft_tree import AcceptedPath, DraftTree

_NARROW = {torch.bfloat16, torch.float32}
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
        return mamba2.mamba2_tree(*operands, slots_B, tree)
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
        return gdn.gdn_tree(q_BTGK, k_BTGK, v_BTHV, log_a_BTH, beta_BTH, state_pool, slots_B, tree)
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
        return kda.kda_tree(*operands, state_pool, slots_B, tree)
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
        return mamba2.mamba2_tree_states(*operands, slots_B, tree, node_states)
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
        return gdn.gdn_tree_states(*operands, slots_B, tree, node_states)
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
        return kda.kda_tree_states(*operands, slots_B, tree, node_states)
    _build_unless_traced()
    return _ops.delta_tree_states(*operands, slots_B, tree.parents_BT, node_states)


def _are_narrow(*tensors: Tensor) -> bool:
    """Whether a kernel exists for these dtypes."""
    return {tensor.dtype for tensor in tensors} <= _NARROW


def _build_unless_traced() -> None:
    if not torch.compiler.is_compiling():
        ensure_trees_built()

"""What the compiler is told about the kernels over draft trees. As in `schemas.py`; trees come as their parents."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.ops.cpu_kernels.tree_build import ensure_trees_built_or_building

_library = torch.library.Library("hybrid_runtime_cpu", "FRAGMENT")
_library.define(
    "mamba2_tree(Tensor x_BTHP, Tensor dt_BTH, Tensor a_H, Tensor b_BTGN, Tensor c_BTGN, Tensor state_pool, "
    "Tensor slots_B, Tensor parents_BT) -> Tensor"
)
_library.define(
    "mamba2_fold(Tensor(a!) state_pool, Tensor slots_B, Tensor destinations_B, Tensor dt_BTH, Tensor a_H, "
    "Tensor x_BTHP, Tensor b_BTGN, Tensor nodes_BT, Tensor num_nodes_B) -> ()"
)
_library.define(
    "delta_tree(Tensor q_BTGK, Tensor k_BTGK, Tensor v_BTHV, Tensor log_a_BTHK, Tensor beta_BTH, Tensor state_pool, "
    "Tensor slots_B, Tensor parents_BT) -> (Tensor, Tensor)"
)
_library.define(
    "delta_fold(Tensor(a!) state_pool, Tensor slots_B, Tensor destinations_B, Tensor k_BTGK, Tensor u_BTHV, "
    "Tensor log_a_BTHK, Tensor nodes_BT, Tensor num_nodes_B) -> ()"
)
_library.define(
    "mamba2_tree_states(Tensor x_BTHP, Tensor dt_BTH, Tensor a_H, Tensor b_BTGN, Tensor c_BTGN, Tensor state_pool, "
    "Tensor slots_B, Tensor parents_BT, Tensor(a!) node_states) -> Tensor"
)
_library.define(
    "delta_tree_states(Tensor q_BTGK, Tensor k_BTGK, Tensor v_BTHV, Tensor log_a_BTHK, Tensor beta_BTH, "
    "Tensor state_pool, Tensor slots_B, Tensor parents_BT, Tensor(a!) node_states) -> Tensor"
)
_library.define(
    "conv_tree(Tensor x_BTD, Tensor weight_DW, Tensor? bias_D, Tensor window_pool, Tensor slots_B, Tensor parents_BT) "
    "-> Tensor"
)
_library.define(
    "conv_fold(Tensor(a!) window_pool, Tensor slots_B, Tensor destinations_B, Tensor x_BTD, Tensor nodes_BT, "
    "Tensor num_nodes_B) -> ()"
)
_library.define(
    "tree_attention(Tensor q_BTHD, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor request_rows_B, "
    "Tensor committed_lens_B, Tensor kv_slots_BT, Tensor parents_BT, float scale, int window) -> Tensor"
)


@torch.library.register_fake("hybrid_runtime_cpu::mamba2_tree", lib=_library)
def _mamba2_tree(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    parents_BT: Tensor,
) -> Tensor:
    ensure_trees_built_or_building()
    return x_BTHP.new_empty(x_BTHP.shape)


@torch.library.register_fake("hybrid_runtime_cpu::mamba2_fold", lib=_library)
def _mamba2_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    x_BTHP: Tensor,
    b_BTGN: Tensor,
    nodes_BT: Tensor,
    num_nodes_B: Tensor,
) -> None:
    ensure_trees_built_or_building()


@torch.library.register_fake("hybrid_runtime_cpu::delta_tree", lib=_library)
def _delta_tree(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTHK: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    parents_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    ensure_trees_built_or_building()
    return v_BTHV.new_empty(v_BTHV.shape), v_BTHV.new_empty(v_BTHV.shape, dtype=torch.float32)


@torch.library.register_fake("hybrid_runtime_cpu::delta_fold", lib=_library)
def _delta_fold(
    state_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    k_BTGK: Tensor,
    u_BTHV: Tensor,
    log_a_BTHK: Tensor,
    nodes_BT: Tensor,
    num_nodes_B: Tensor,
) -> None:
    ensure_trees_built_or_building()


@torch.library.register_fake("hybrid_runtime_cpu::mamba2_tree_states", lib=_library)
def _mamba2_tree_states(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    parents_BT: Tensor,
    node_states: Tensor,
) -> Tensor:
    ensure_trees_built_or_building()
    return x_BTHP.new_empty(x_BTHP.shape)


@torch.library.register_fake("hybrid_runtime_cpu::delta_tree_states", lib=_library)
def _delta_tree_states(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_a_BTHK: Tensor,
    beta_BTH: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    parents_BT: Tensor,
    node_states: Tensor,
) -> Tensor:
    ensure_trees_built_or_building()
    return v_BTHV.new_empty(v_BTHV.shape)


@torch.library.register_fake("hybrid_runtime_cpu::conv_tree", lib=_library)
def _conv_tree(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    window_pool: Tensor,
    slots_B: Tensor,
    parents_BT: Tensor,
) -> Tensor:
    ensure_trees_built_or_building()
    return x_BTD.new_empty(x_BTD.shape)


@torch.library.register_fake("hybrid_runtime_cpu::conv_fold", lib=_library)
def _conv_fold(
    window_pool: Tensor,
    slots_B: Tensor,
    destinations_B: Tensor,
    x_BTD: Tensor,
    nodes_BT: Tensor,
    num_nodes_B: Tensor,
) -> None:
    ensure_trees_built_or_building()


@torch.library.register_fake("hybrid_runtime_cpu::tree_attention", lib=_library)
def _tree_attention(
    q_BTHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    committed_lens_B: Tensor,
    kv_slots_BT: Tensor,
    parents_BT: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    ensure_trees_built_or_building()
    return q_BTHD.new_empty(*q_BTHD.shape[:3], v_pool.shape[2])

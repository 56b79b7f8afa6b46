"""Mixture of experts: routers that choose experts for each token, and the experts' feed-forward.

Shapes: L tokens, E experts, K experts of a token, D model dim, F expert dim, M tokens routed to one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import einsum, rearrange, reduce
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from hybrid_runtime.ops.ragged import state_dtype_for


class Routing(NamedTuple):
    """The experts of each token and the weights of their outputs."""

    expert_ids_LK: Tensor  # int64
    expert_weights_LK: Tensor  # dtype of the router's logits


def softmax_topk_router(logits_LE: Tensor, top_k: int, *, normalize: bool, softmax_before_topk: bool) -> Routing:
    """The `top_k` largest logits, weighted by a softmax.

    `softmax_before_topk`: True weighs by the softmax over all experts, divided by its sum over the chosen ones if
    `normalize` (Qwen3-Next); False takes the softmax over the chosen ones, which has sum one already (Granite).
    """
    logits_LE_ = logits_LE.to(state_dtype_for(logits_LE))
    if softmax_before_topk:
        weights_LK, ids_LK = logits_LE_.softmax(-1).topk(top_k, dim=-1)
        if normalize:
            weights_LK = weights_LK / weights_LK.sum(-1, keepdim=True)
    else:
        chosen_LK, ids_LK = logits_LE_.topk(top_k, dim=-1)
        weights_LK = chosen_LK.softmax(-1)
    return Routing(ids_LK, weights_LK.to(logits_LE.dtype))


def sigmoid_group_router(
    logits_LE: Tensor,
    correction_bias_E: Tensor,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scaling: float,
) -> Routing:
    """The router of DeepSeek-V3 and Kimi Linear: sigmoid scores, experts chosen inside the best groups.

    Experts are ranked by score plus `correction_bias_E`, groups (E // num_groups neighbouring experts) by the sum of
    their two best ranks; the weights are the scores without bias, divided by their sum if `normalize`, times `scaling`.
    """
    dtype = state_dtype_for(logits_LE, correction_bias_E)
    scores_LE = logits_LE.to(dtype).sigmoid()
    ranks_LE = scores_LE + correction_bias_E.to(dtype)
    if topk_groups < num_groups:
        ranks_LGE = rearrange(ranks_LE, "l (g e) -> l g e", g=num_groups)
        group_ranks_LG = ranks_LGE.topk(min(2, ranks_LGE.shape[-1]), dim=-1).values.sum(-1)
        best_groups = group_ranks_LG.topk(topk_groups, dim=-1).indices
        outside_LG = torch.ones_like(group_ranks_LG, dtype=torch.bool).scatter(1, best_groups, False)
        ranks_LE = rearrange(ranks_LGE.masked_fill(outside_LG[..., None], -torch.inf), "l g e -> l (g e)")
    ids_LK = ranks_LE.topk(top_k, dim=-1).indices
    weights_LK = scores_LE.gather(1, ids_LK)
    if normalize:
        weights_LK = weights_LK / (weights_LK.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all underflow
    return Routing(ids_LK, (weights_LK * scaling).to(logits_LE.dtype))


def moe_feed_forward(
    x_LD: Tensor,
    expert_ids_LK: Tensor,
    expert_weights_LK: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """`Σ_k weight_k down_e (activation(gate_e x) ∘ up_e x)` over the experts e of each token.

    `gate_up_weight` `[E, 2 F, D]` holds each expert's gate over its up projection, `down_weight` is `[E, D, F]`.
    Tokens are sorted by expert and every expert that has any runs once. The K outputs of a token are added in the order
    of `expert_ids_LK`, in float32 (float64), so a token's result does not hang on which tokens share its experts.
    Waits for the device once: the expert loop needs the counts on the host.
    """
    num_choices = expert_ids_LK.shape[1]
    flat_ids = expert_ids_LK.flatten()
    order = flat_ids.argsort(stable=True)
    x_sorted = x_LD[order // num_choices]
    y_sorted = torch.empty_like(x_sorted)
    begin = 0
    for expert, count in enumerate(torch.bincount(flat_ids, minlength=gate_up_weight.shape[0]).tolist()):
        if count:
            x_MD = x_sorted[begin : begin + count]
            gate_MF, up_MF = linear(x_MD, gate_up_weight[expert]).chunk(2, dim=-1)
            y_sorted[begin : begin + count] = linear(activation(gate_MF) * up_MF, down_weight[expert])
            begin += count
    y_flat = torch.empty_like(y_sorted)
    y_flat[order] = y_sorted
    return _weighted_sum(rearrange(y_flat, "(l k) d -> l k d", k=num_choices), expert_weights_LK)


def moe_feed_forward_gathered(
    x_LD: Tensor,
    expert_ids_LK: Tensor,
    expert_weights_LK: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Same contract as `moe_feed_forward` with shapes that do not depend on the routing, for captured decode steps.

    Gathers the weights of every choice of every token, `L K 3 F D` elements: meant for few tokens.
    """
    gate_LKF, up_LKF = einsum(gate_up_weight[expert_ids_LK], x_LD, "l k f d, l d -> l k f").chunk(2, dim=-1)
    y_LKD = einsum(down_weight[expert_ids_LK], activation(gate_LKF) * up_LKF, "l k d f, l k f -> l k d")
    return _weighted_sum(y_LKD, expert_weights_LK)


def moe_feed_forward_grouped(
    x_LD: Tensor,
    expert_ids_LK: Tensor,
    expert_weights_LK: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Same contract as `moe_feed_forward` with shapes that do not depend on the routing, for captured verifies.

    One product for all experts, over tokens sorted by expert (`torch.nn.functional.grouped_mm`), reads the weights of
    each expert that is chosen once; nothing waits for counts. On CUDA it needs bfloat16 and compute capability 9.0:
    otherwise torch loops over experts, and waits.
    """
    num_choices, num_experts = expert_ids_LK.shape[1], gate_up_weight.shape[0]
    flat_ids = expert_ids_LK.flatten()
    order = flat_ids.argsort(stable=True)
    ends_E = (flat_ids[:, None] <= torch.arange(num_experts, device=flat_ids.device)).sum(0, dtype=torch.int32)
    gate_up = grouped_mm(x_LD[order // num_choices], gate_up_weight.mT, offs=ends_E)
    gate, up = gate_up.chunk(2, dim=-1)
    y_sorted = grouped_mm(activation(gate) * up, down_weight.mT, offs=ends_E)
    y_flat = torch.empty_like(y_sorted).index_copy(0, order, y_sorted)
    return _weighted_sum(rearrange(y_flat, "(l k) d -> l k d", k=num_choices), expert_weights_LK)


def _weighted_sum(y_LKD: Tensor, expert_weights_LK: Tensor) -> Tensor:
    dtype = state_dtype_for(y_LKD, expert_weights_LK)
    y_LD = reduce(y_LKD.to(dtype) * expert_weights_LK.to(dtype)[..., None], "l k d -> l d", "sum")
    return y_LD.to(y_LKD.dtype)

"""Feed-forward parts of a block: a gated MLP, and a mixture of such experts.

Shapes: N tokens or rows, D hidden size, F intermediate size, E experts, K experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import linear, silu

from hybrid_runtime.models.spec import FeedForwardSpec, MoeSpec, SoftmaxRouterSpec
from hybrid_runtime.models.weights import FeedForwardWeights, GatedMlpWeights, MoeWeights
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.moe import (
    Routing,
    moe_feed_forward_gathered,
    sigmoid_group_router,
    softmax_topk_router,
)
from hybrid_runtime.ops.ragged import state_dtype_for


class FeedForward(ABC):
    """Maps tokens one by one. Both forms give the same result; `decode` has shapes that no routing changes."""

    has_one_form: ClassVar[bool] = True

    @abstractmethod
    def prefill(self, x_ND: Tensor) -> Tensor:
        """Output `[N, D]`, in the form for many tokens."""

    def decode(self, x_ND: Tensor) -> Tensor:
        """Output `[N, D]`, in the form for few tokens: captured steps need it."""
        assert self.has_one_form
        return self.prefill(x_ND)

    def verify(self, x_ND: Tensor) -> Tensor:
        """Output `[N, D]` for the nodes of draft trees: as `decode`, in a form for more tokens if there is one."""
        return self.decode(x_ND)


class GatedMlp(FeedForward):
    def __init__(self, weights: GatedMlpWeights, kernels: Kernels) -> None:
        self.weights = weights
        self.kernels = kernels

    def prefill(self, x_ND: Tensor) -> Tensor:
        parts = [self.kernels.linear(x_ND, *part) for part in self.weights.gate_up]
        gate_NF, up_NF = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        return self.kernels.linear(silu(gate_NF) * up_NF, *self.weights.down)


class MixtureOfExperts(FeedForward):
    has_one_form = False

    def __init__(self, spec: MoeSpec, weights: MoeWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self.shared = None if weights.shared_expert is None else GatedMlp(weights.shared_expert, kernels)

    def prefill(self, x_ND: Tensor) -> Tensor:
        routed_ND = self.kernels.moe_feed_forward(
            x_ND, *self._route(x_ND), self.weights.gate_up_EFD, self.weights.down_EDF, silu
        )
        return self._add_shared(x_ND, routed_ND)

    def decode(self, x_ND: Tensor) -> Tensor:
        routed_ND = moe_feed_forward_gathered(
            x_ND, *self._route(x_ND), self.weights.gate_up_EFD, self.weights.down_EDF, silu
        )
        return self._add_shared(x_ND, routed_ND)

    def verify(self, x_ND: Tensor) -> Tensor:
        routed_ND = self.kernels.moe_feed_forward_fixed(
            x_ND, *self._route(x_ND), self.weights.gate_up_EFD, self.weights.down_EDF, silu
        )
        return self._add_shared(x_ND, routed_ND)

    def _route(self, x_ND: Tensor) -> Routing:
        spec, weights = self.spec.router, self.weights
        if isinstance(spec, SoftmaxRouterSpec):
            return softmax_topk_router(
                self.kernels.linear(x_ND, *weights.router),
                spec.top_k,
                normalize=spec.renormalize,
                softmax_before_topk=spec.softmax_before_top_k,
            )
        # The reference computes these scores in float32 whatever the model's dtype: near-ties decide between experts.
        dtype = state_dtype_for(x_ND)
        assert weights.correction_bias_E is not None
        return sigmoid_group_router(
            linear(x_ND.to(dtype), weights.router.weight_OI.to(dtype)),
            weights.correction_bias_E,
            spec.top_k,
            num_groups=spec.num_groups,
            topk_groups=spec.top_k_groups,
            normalize=spec.renormalize,
            scaling=spec.scale,
        )

    def _add_shared(self, x_ND: Tensor, routed_ND: Tensor) -> Tensor:
        if self.shared is None:
            return routed_ND
        shared_ND = self.shared.prefill(x_ND)
        if self.weights.shared_gate is not None:
            shared_ND = self.kernels.linear(x_ND, *self.weights.shared_gate).sigmoid() * shared_ND
        return routed_ND + shared_ND


def build_feed_forward(spec: FeedForwardSpec, weights: FeedForwardWeights, kernels: Kernels) -> FeedForward:
    """The part that executes a spec with the given weights."""
    if isinstance(spec, MoeSpec):
        assert isinstance(weights, MoeWeights)
        return MixtureOfExperts(spec, weights, kernels)
    assert isinstance(weights, GatedMlpWeights)
    return GatedMlp(weights, kernels)

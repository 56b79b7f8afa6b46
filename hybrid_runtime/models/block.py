"""One depth of a model: mixers in parallel, then a feed-forward, each behind a norm and added to the residual stream.

Shapes: N tokens or rows (L in prefill, B in decode), D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs
from hybrid_runtime.models.feed_forward import FeedForward, build_feed_forward
from hybrid_runtime.models.mixers import Mixer, MixerMemory, build_mixer
from hybrid_runtime.models.spec import BlockSpec, NormSpec
from hybrid_runtime.models.weights import BlockWeights
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import rms_norm


class Block:
    """Executes a `BlockSpec`. It owns no memory, so one block may stand at several depths."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.mixers: tuple[Mixer, ...] = tuple(
            build_mixer(branch.mixer, mixer_weights, kernels)
            for branch, mixer_weights in zip(spec.branches, weights.mixers, strict=True)
        )
        self.feed_forward: FeedForward | None = None
        if spec.feed_forward is not None:
            assert weights.feed_forward is not None
            self.feed_forward = build_feed_forward(spec.feed_forward, weights.feed_forward, kernels)

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
        """The residual stream behind this depth; writes `memories`, one per branch."""
        if self.mixers:
            branch_inputs = self._branch_inputs(x_LD)
            outputs = [
                mixer.prefill(h_LD, inputs, memory)
                for mixer, h_LD, memory in zip(self.mixers, branch_inputs, memories, strict=True)
            ]
            x_LD = self._add_branches(x_LD, outputs)
        if self.feed_forward is not None:
            x_LD = self._add(x_LD, self.feed_forward.prefill(self._feed_forward_input(x_LD)))
        return x_LD

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
        """The residual stream behind this depth; writes `memories`, one per branch."""
        if self.mixers:
            branch_inputs = self._branch_inputs(x_BD)
            outputs = [
                mixer.decode(h_BD, inputs, memory)
                for mixer, h_BD, memory in zip(self.mixers, branch_inputs, memories, strict=True)
            ]
            x_BD = self._add_branches(x_BD, outputs)
        if self.feed_forward is not None:
            x_BD = self._add(x_BD, self.feed_forward.decode(self._feed_forward_input(x_BD)))
        return x_BD

    def _branch_inputs(self, x_ND: Tensor) -> list[Tensor]:
        normed_ND = apply_norm(x_ND, self.spec.branch_norm, self.weights.branch_norm_D)
        return [scale(normed_ND, branch.input_multiplier) for branch in self.spec.branches]

    def _add_branches(self, x_ND: Tensor, outputs: list[Tensor]) -> Tensor:
        first_ND, *others = (
            scale(output_ND, branch.output_multiplier)
            for output_ND, branch in zip(outputs, self.spec.branches, strict=True)
        )
        return self._add(x_ND, sum(others, first_ND))

    def _feed_forward_input(self, x_ND: Tensor) -> Tensor:
        return apply_norm(x_ND, self.spec.feed_forward_norm, self.weights.feed_forward_norm_D)

    def _add(self, x_ND: Tensor, update_ND: Tensor) -> Tensor:
        return x_ND + scale(update_ND, self.spec.residual_multiplier)


def apply_norm(x_ND: Tensor, spec: NormSpec | None, weight_D: Tensor | None) -> Tensor:
    """The norm of a spec with its weight; a spec that has one has both."""
    assert spec is not None
    assert weight_D is not None
    return rms_norm(x_ND, weight_D, spec.eps, offset=spec.offset)


def scale(x: Tensor, multiplier: float) -> Tensor:
    """`multiplier * x`, free of cost for the usual 1.0."""
    return x if multiplier == 1.0 else x * multiplier

"""One depth of a model: mixers in parallel, then a feed-forward, each behind a norm and added to the residual stream.

Shapes: N tokens, rows or nodes (L in prefill, B in decode, B trees of T nodes in verify), D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_runtime.graphs.step_inputs import CommitInputs, DecodeInputs, PrefillInputs, VerifyInputs
from hybrid_runtime.models.feed_forward import build_feed_forward
from hybrid_runtime.models.mixers import AttentionMixer, Mixer, MixerMemory, RecurrentMixer, build_mixer
from hybrid_runtime.models.rollback import Rollback
from hybrid_runtime.models.spec import BlockSpec, NormSpec
from hybrid_runtime.models.weights import BlockWeights
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import rms_norm


class MixerSublayer:
    """The mixers of a block: they read the same normed stream, and what they yield is added up."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, kernels: Kernels) -> None:
        self.norm = spec.branch_norm
        self.norm_D = weights.branch_norm_D
        self.residual_multiplier = spec.residual_multiplier
        self.input_multipliers = tuple(branch.input_multiplier for branch in spec.branches)
        self.output_multipliers = tuple(branch.output_multiplier for branch in spec.branches)
        self.mixers: tuple[Mixer, ...] = tuple(
            build_mixer(branch.mixer, mixer_weights, kernels)
            for branch, mixer_weights in zip(spec.branches, weights.mixers, strict=True)
        )

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
        """The residual stream behind the mixers; writes `memories`, one per mixer."""
        branches = zip(self.mixers, self._branch_inputs(x_LD), memories, strict=True)
        return self._add(x_LD, [mixer.prefill(h_LD, inputs, memory) for mixer, h_LD, memory in branches])

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
        """The residual stream behind the mixers; writes `memories`, one per mixer."""
        branches = zip(self.mixers, self._branch_inputs(x_BD), memories, strict=True)
        return self._add(x_BD, [mixer.decode(h_BD, inputs, memory) for mixer, h_BD, memory in branches])

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memories: Sequence[MixerMemory], rollback: Rollback) -> Tensor:
        """The residual stream behind the mixers; writes KV of the nodes, and records."""
        branches = zip(self.mixers, self._branch_inputs(x_ND), memories, strict=True)
        return self._add(x_ND, [_verify(mixer, h_ND, inputs, memory, rollback) for mixer, h_ND, memory in branches])

    def commit(self, inputs: CommitInputs, memories: Sequence[MixerMemory], rollback: Rollback) -> None:
        """Writes the states behind the accepted paths."""
        for mixer, memory in zip(self.mixers, memories, strict=True):
            if isinstance(mixer, RecurrentMixer):
                mixer.commit(inputs, memory, rollback)

    def _branch_inputs(self, x_ND: Tensor) -> list[Tensor]:
        normed_ND = apply_norm(x_ND, self.norm, self.norm_D)
        return [scale(normed_ND, multiplier) for multiplier in self.input_multipliers]

    def _add(self, x_ND: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        first_ND, *others = (
            scale(output_ND, multiplier) for output_ND, multiplier in zip(outputs, self.output_multipliers, strict=True)
        )
        return x_ND + scale(sum(others, first_ND), self.residual_multiplier)


class FeedForwardSublayer:
    """The feed-forward of a block. A token's result depends on that token alone."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, kernels: Kernels) -> None:
        assert spec.feed_forward is not None
        assert weights.feed_forward is not None
        self.norm = spec.feed_forward_norm
        self.norm_D = weights.feed_forward_norm_D
        self.residual_multiplier = spec.residual_multiplier
        self.feed_forward = build_feed_forward(spec.feed_forward, weights.feed_forward, kernels)

    def prefill(self, x_ND: Tensor) -> Tensor:
        """The residual stream behind the feed-forward."""
        update_ND = self.feed_forward.prefill(apply_norm(x_ND, self.norm, self.norm_D))
        return x_ND + scale(update_ND, self.residual_multiplier)

    def decode(self, x_ND: Tensor) -> Tensor:
        """The residual stream behind the feed-forward."""
        update_ND = self.feed_forward.decode(apply_norm(x_ND, self.norm, self.norm_D))
        return x_ND + scale(update_ND, self.residual_multiplier)

    def verify(self, x_ND: Tensor) -> Tensor:
        """The residual stream behind the feed-forward."""
        update_ND = self.feed_forward.verify(apply_norm(x_ND, self.norm, self.norm_D))
        return x_ND + scale(update_ND, self.residual_multiplier)


class Block:
    """Executes a `BlockSpec`. It owns no memory, so one block may stand at several depths."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.mixing = MixerSublayer(spec, weights, kernels) if spec.branches else None
        self.feed_forward = FeedForwardSublayer(spec, weights, kernels) if spec.feed_forward is not None else None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return () if self.mixing is None else self.mixing.mixers

    def prefill(self, x_LD: Tensor, inputs: PrefillInputs, memories: Sequence[MixerMemory]) -> Tensor:
        """The residual stream behind this depth; writes `memories`, one per branch."""
        if self.mixing is not None:
            x_LD = self.mixing.prefill(x_LD, inputs, memories)
        return x_LD if self.feed_forward is None else self.feed_forward.prefill(x_LD)

    def decode(self, x_BD: Tensor, inputs: DecodeInputs, memories: Sequence[MixerMemory]) -> Tensor:
        """The residual stream behind this depth; writes `memories`, one per branch."""
        if self.mixing is not None:
            x_BD = self.mixing.decode(x_BD, inputs, memories)
        return x_BD if self.feed_forward is None else self.feed_forward.decode(x_BD)

    def verify(self, x_ND: Tensor, inputs: VerifyInputs, memories: Sequence[MixerMemory], rollback: Rollback) -> Tensor:
        """The residual stream behind this depth; writes KV of the nodes, and records."""
        if self.mixing is not None:
            x_ND = self.mixing.verify(x_ND, inputs, memories, rollback)
        return x_ND if self.feed_forward is None else self.feed_forward.verify(x_ND)


def _verify(mixer: Mixer, x_ND: Tensor, inputs: VerifyInputs, memory: MixerMemory, rollback: Rollback) -> Tensor:
    if isinstance(mixer, AttentionMixer):
        return mixer.verify(x_ND, inputs, memory)
    assert isinstance(mixer, RecurrentMixer)
    return mixer.verify(x_ND, inputs, memory, rollback)


def apply_norm(x_ND: Tensor, spec: NormSpec | None, weight_D: Tensor | None) -> Tensor:
    """The norm of a spec with its weight; a spec that has one has both."""
    assert spec is not None
    assert weight_D is not None
    return rms_norm(x_ND, weight_D, spec.eps, offset=spec.offset)


def scale(x: Tensor, multiplier: float) -> Tensor:
    """`multiplier * x`, free of cost for the usual 1.0."""
    return x if multiplier == 1.0 else x * multiplier

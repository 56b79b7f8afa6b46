"""Mixers: one file per kind. `build_mixer` is the one place that knows which class executes which spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid_runtime.models.mixers.attention import GqaMixer
from hybrid_runtime.models.mixers.base import AttentionMixer, Mixer, MixerMemory
from hybrid_runtime.models.mixers.gdn import GdnMixer
from hybrid_runtime.models.mixers.kda import KdaMixer
from hybrid_runtime.models.mixers.mamba2 import Mamba2Mixer
from hybrid_runtime.models.mixers.mla import MlaMixer
from hybrid_runtime.models.mixers.recurrent import RecurrentMixer
from hybrid_runtime.models.spec import AttentionSpec, GdnSpec, KdaSpec, Mamba2Spec, MixerSpec, MlaSpec
from hybrid_runtime.ops.kernels import Kernels

__all__ = ["AttentionMixer", "Mixer", "MixerMemory", "RecurrentMixer", "build_mixer"]

_MIXERS: Mapping[type[MixerSpec], Callable[[Any, Any, Kernels], Mixer]] = {
    AttentionSpec: GqaMixer,
    MlaSpec: MlaMixer,
    Mamba2Spec: Mamba2Mixer,
    GdnSpec: GdnMixer,
    KdaSpec: KdaMixer,
}


def build_mixer(spec: MixerSpec, weights: Any, kernels: Kernels) -> Mixer:
    """The mixer that executes `spec` with weights of the class that its file names."""
    return _MIXERS[type(spec)](spec, weights, kernels)

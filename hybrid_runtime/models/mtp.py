"""A head that drafts several tokens ahead from the target's committed KV: frozen-KV multi-token prediction.

Each step of a draft reads the embedding of a node's token and the hidden state of its parent: at the root the target's
own, behind it the head's. Blocks of query-only attention over the KV of the target's attention layers and of gated MLPs
make the node's hidden state of it, and the target's output map turns that into logits of the next token. All steps
share one set of weights and see the same committed tokens: the head needs no memory of its own, and a rejected draft
leaves nothing to take back. (Multi-token prediction: Gloeckle et al. 2024, DeepSeek-V3 2024; drafting from the target's
features: EAGLE, Li et al. 2024.)

Shapes: N nodes of draft trees, D hidden size, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybrid_runtime.graphs.step_inputs import StepMemory
from hybrid_runtime.models.block import scale
from hybrid_runtime.models.feed_forward import GatedMlp
from hybrid_runtime.models.frozen_attention import FrozenContext, build_frozen_attention
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import AttentionMixer, MixerMemory
from hybrid_runtime.models.mtp_weights import (
    MtpBlockWeights,
    MtpSpec,
    MtpWeights,
    attention_mixers,
    tensor_shapes,
)
from hybrid_runtime.models.weights import Linear, map_linears
from hybrid_runtime.ops.kernels import Kernels
from hybrid_runtime.ops.norms import rms_norm
from hybrid_runtime.ops.ragged import state_dtype_for

__all__ = ["MTP_FILE", "MtpHead", "MtpSpec", "MtpWeights", "load_mtp", "save_mtp"]

MTP_FILE = "mtp.safetensors"
"""The head of a checkpoint folder lies beside its weights, under this name."""

_METADATA_KEY = "mtp"


class _MtpBlock:
    """Attention over frozen KV, then a gated MLP, each behind a norm and added to the stream."""

    def __init__(
        self, spec: MtpSpec, kv_layer: int, mixer: AttentionMixer, weights: MtpBlockWeights, kernels: Kernels
    ) -> None:
        self.eps = spec.norm_eps
        self.kv_layer = kv_layer
        self.weights = weights
        self.attention = build_frozen_attention(mixer, spec.num_heads, weights.attention, kernels)
        self.feed_forward = GatedMlp(weights.feed_forward, kernels)

    def __call__(self, x_ND: Tensor, context: FrozenContext, memory: StepMemory) -> Tensor:
        """The stream behind this block."""
        layer = MixerMemory(memory.kv_layers[self.kv_layer], memory.req_to_token)
        normed_ND = rms_norm(x_ND, self.weights.attention_norm_D, self.eps)
        x_ND = x_ND + self.attention(normed_ND, context, layer)
        return x_ND + self.feed_forward.decode(rms_norm(x_ND, self.weights.feed_forward_norm_D, self.eps))


class MtpHead:
    """Executes an `MtpSpec` beside a target, whose embedding, output map and kernels it uses. Stateless.

    Its weights have the target's dtype and device.
    """

    def __init__(self, spec: MtpSpec, weights: MtpWeights, target: HybridModel) -> None:
        self.spec = spec
        self.weights = weights
        self.target = target
        mixers = attention_mixers(target)
        self.blocks = tuple(
            _MtpBlock(spec, layer, mixers[layer], block_weights, target.kernels)
            for layer, block_weights in zip(spec.kv_layers, weights.blocks, strict=True)
        )

    @torch.no_grad()
    def with_target(self, target: HybridModel) -> MtpHead:
        """The same head beside the same model in other forms of its operations, with the copies that these want."""
        linears: list[Linear] = []

        def note(linear: Linear) -> Linear:
            linears.append(linear)
            return linear

        map_linears(self.weights, note)
        packed = iter(target.kernels.pack([linear.weight_OI for linear in linears]))
        weights = map_linears(self.weights, lambda linear: linear._replace(packed=next(packed)))
        return MtpHead(self.spec, weights, target)

    @torch.no_grad()
    def step(
        self,
        token_ids_N: Tensor,
        hidden_ND: Tensor,
        positions_N: Tensor,
        request_rows_N: Tensor,
        context_lens_N: Tensor,
        max_context_len: int,
        memory: StepMemory,
    ) -> tuple[Tensor, Tensor]:
        """One step of a draft, for N nodes of any requests. Reads the KV of committed tokens; writes nothing.

        `token_ids_N`: int64, the nodes' tokens. `hidden_ND`: the hidden state of each node's parent, in the target's
        dtype; for a root, the target's residual stream behind its last block at the last committed token.
        `positions_N`, `context_lens_N`: int64, both the committed length of the node's request, at least 1 and at most
        `max_context_len`, however deep the node is. `request_rows_N`: int64, rows of `req_to_token`. Padding nodes:
        token 0, row 0, length 1; their results mean nothing.

        Returns logits `[N, V]` of the token behind each node, float32 (float64 for a float64 model), and the nodes'
        hidden states `[N, D]`.
        """
        context = FrozenContext(positions_N, request_rows_N, context_lens_N, max_context_len)
        weights, eps = self.weights, self.spec.norm_eps
        embedded_ND = rms_norm(self.target.embed(token_ids_N), weights.embedding_norm_D, eps)
        parent_ND = rms_norm(hidden_ND, weights.hidden_norm_D, eps)
        x_ND = self.target.kernels.linear(torch.cat([embedded_ND, parent_ND], dim=-1), *weights.project)
        for block in self.blocks:
            x_ND = block(x_ND, context, memory)
        return self._logits(x_ND), x_ND

    def _logits(self, x_ND: Tensor) -> Tensor:
        """Through the head's own final norm and the target's output map."""
        normed_ND = rms_norm(x_ND, self.weights.final_norm_D, self.spec.norm_eps)
        logits_NV = self.target.kernels.linear(normed_ND, *self.target.weights.lm_head)
        return scale(logits_NV.to(state_dtype_for(logits_NV)), self.target.spec.logits_multiplier)


def load_mtp(path: str | os.PathLike[str], target: HybridModel) -> MtpHead:
    """The head in a file that `save_mtp` wrote, for `target`: converted to its dtype and device.

    Raises FileNotFoundError if there is no such file, and ValueError, which names the file and what does not fit, if
    it holds no head, lacks a weight, or holds a head for a model of other sizes.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_METADATA_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no iterable, just keys()
        if text is None:
            raise ValueError(f"no multi-token-prediction head: its metadata have no {_METADATA_KEY!r}")
        spec = MtpSpec.from_json(text)
        _require_shapes(tensors, tensor_shapes(spec, target))
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from error
    converted = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
    return MtpHead(spec, MtpWeights.of(converted, len(spec.kv_layers)), target)


def save_mtp(path: str | os.PathLike[str], spec: MtpSpec, tensors: Mapping[str, Tensor]) -> None:
    """Writes a head: `tensors` as `tensor_shapes` names them, matrices in bfloat16 and norms in float32, and `spec` as
    JSON in the metadata. The file is replaced as a whole.
    """
    path = Path(path)
    stored = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.ndim == 2 else torch.float32).contiguous()
        for name, tensor in tensors.items()
    }
    scratch = path.with_name(path.name + ".partial")
    save_file(stored, scratch, metadata={_METADATA_KEY: spec.to_json()})
    os.replace(scratch, path)


def _require_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless there are exactly the named tensors, each of its shape."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"the weight {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"the weight {name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    unknown = sorted(set(tensors) - set(shapes))
    if unknown:
        raise ValueError(f"there are weights that no block uses: {', '.join(unknown[:8])}")

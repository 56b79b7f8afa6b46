"""Training forward of a frozen-KV head: all positions of a batch at once, over latents of a `kimi_linear` target.

At position t the head stands as it will in a draft whose committed tokens are 0..t: step 1 reads the true token t + 1
and the target's hidden state at t, step s the true token t + s and the head's own hidden state of step s - 1. Every
step attends to the latents of tokens 0..t. The logits of step s are for token t + s + 1.

Shapes: B batch, L tokens, N positions drafted from (the first of the L), D hidden size, H heads, R latent dim, C = R +
shared key channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from hybrid_runtime.models.mtp_weights import MtpSpec
from hybrid_runtime.training.forward import TrainingForward, linear, rms_norm


class MtpModule(nn.Module):
    """The weights of a head as parameters, under the names of `tensor_shapes`."""

    def __init__(self, spec: MtpSpec, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(nn.Module() for _ in spec.kv_layers)
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor.detach().float().clone()))


@dataclass(frozen=True)
class Teacher:
    """What the frozen target makes of a batch of tokens, for the head to read and to agree with."""

    hidden_BLD: Tensor
    latents: tuple[Tensor, ...]  # of each attention layer, [B, L, C]
    logits_BLV: Tensor


class MtpForward:
    """Runs a target and a head over batches. `compiled=False` runs the same functions eagerly."""

    def __init__(self, target: Any, head: MtpModule, matmul_dtype: torch.dtype, *, compiled: bool) -> None:
        """`target`: a `KimiLinearForCausalLM` whose feed-forward layers are dense. It stays as it is."""

        def maybe_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self.head = head
        self._target = target
        self._dtype = matmul_dtype
        self._target_forward = TrainingForward(target, matmul_dtype, compiled=compiled)
        self._step = maybe_compiled(_step)
        self._logits = maybe_compiled(_logits)
        config = target.config
        self._scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        self._latent_dim = config.kv_lora_rank

    @torch.no_grad()
    def teach(self, ids_BL: Tensor) -> Teacher:
        """The target's view of `ids_BL`; L must be a multiple of the KDA chunk."""
        hidden_BLD, latents = self.read(ids_BL)
        norm = self._target.model.norm.weight
        eps = self._target.config.rms_norm_eps
        logits_BLV = self._logits(hidden_BLD, norm, self._target.lm_head.weight, eps, self._dtype)
        return Teacher(hidden_BLD, latents, logits_BLV)

    def read(self, ids_BL: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The target's hidden states `[B, L, D]`, and the latents `[B, L, C]` of each of its attention layers."""
        return self._target_forward.memory(ids_BL)

    def step(self, ids_BN: Tensor, hidden_BND: Tensor, latents: tuple[Tensor, ...]) -> Tensor:
        """The head's hidden states `[B, N, D]` behind one step at the first N positions of `latents`."""
        embedded_BND = functional.embedding(ids_BN, self._target.model.embed_tokens.weight)
        weights = dict(self.head.named_parameters())
        used = tuple(latents[layer][:, : ids_BN.shape[1]] for layer in self.head.spec.kv_layers)
        dims = (self.head.spec.num_heads, self._latent_dim)
        eps, dtype = self.head.spec.norm_eps, self._dtype
        new_BND: Tensor = self._step(embedded_BND, hidden_BND, used, weights, dims, self._scale, eps, dtype)
        return new_BND

    def logits(self, hidden_BND: Tensor) -> Tensor:
        """The head's logits `[B, N, V]`, through the target's output map."""
        lm_head, eps = self._target.lm_head.weight, self.head.spec.norm_eps
        logits_BNV: Tensor = self._logits(hidden_BND, self.head.final_norm, lm_head, eps, self._dtype)
        return logits_BNV


def _step(
    embedded_BND: Tensor,
    hidden_BND: Tensor,
    latents: tuple[Tensor, ...],
    w: dict[str, Tensor],
    dims: tuple[int, int],
    scale: float,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """`latents`: one per block. `dims`: heads, latent dim."""
    parts = rms_norm(embedded_BND, w["embedding_norm"], eps), rms_norm(hidden_BND, w["hidden_norm"], eps)
    x_BND = linear(torch.cat(parts, dim=-1), w["project"], dtype)
    for index, latent_BNC in enumerate(latents):
        b = {name.removeprefix(f"blocks.{index}."): tensor for name, tensor in w.items()}
        query = linear(rms_norm(x_BND, b["attention_norm"], eps), b["query"], dtype)
        y = _attend(query, latent_BNC, dims, scale, dtype)
        x_BND = x_BND + linear(y, b["output"], dtype)
        gate_up = linear(rms_norm(x_BND, b["feed_forward_norm"], eps), b["gate_up"], dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        x_BND = x_BND + linear(functional.silu(gate) * up, b["down"], dtype)
    return x_BND


def _attend(query: Tensor, latent_BNC: Tensor, dims: tuple[int, int], scale: float, dtype: torch.dtype) -> Tensor:
    """Position t sees the latents 0..t: `[B, N, H R]` of what the heads gather.

    Written out: all heads share one key per token, so that each sequence is one matrix product, and the latents need
    no gradient. Forward and backward take 0.3 times as long on a CPU as torch's fused attention.
    """
    num_heads, latent_dim = dims
    num_tokens = latent_BNC.shape[1]
    key_BNC = latent_BNC.to(dtype)
    query_BQC = rearrange(query.to(dtype), "b n (h c) -> b (h n) c", h=num_heads)
    score_BHNN = (query_BQC @ key_BNC.mT).float().unflatten(1, (num_heads, num_tokens)) * scale
    position_N = torch.arange(num_tokens, device=query.device)
    hidden_NN = position_N[None, :] > position_N[:, None]
    weight_BHNN = score_BHNN.masked_fill(hidden_NN, -torch.inf).softmax(-1).to(dtype)
    y_BQR = weight_BHNN.flatten(1, 2) @ key_BNC[..., :latent_dim]
    return rearrange(y_BQR.float(), "b (h n) r -> b n (h r)", h=num_heads)


def _logits(x_BLD: Tensor, norm: Tensor, lm_head: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return linear(rms_norm(x_BLD, norm, eps), lm_head, dtype)

"""What a machine can do, measured, and what a step of a model has to do, counted.

Bytes are those that any implementation moves: every weight once per step, the states of each row read and written, the
keys and values of each row's context read and its new ones written. Activations are left out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.spec import AttentionSpec, MlaSpec
from hybrid_runtime.models.weights import Linear, MoeWeights

NUM_ROUNDS = 7


@dataclass(frozen=True)
class MachineLimits:
    """The best that PyTorch's own operations reach; of a copy, bytes read and written count."""

    read_gb_s: float
    copy_gb_s: float
    gemm_gflop_s: float  # in the dtype of the model

    def seconds(self, traffic: Traffic) -> float:
        """A lower bound for moving these bytes, all else being free."""
        return 1e-9 * (traffic.read / self.read_gb_s + traffic.updated / self.copy_gb_s)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves."""

    read: int  # and not written
    updated: int  # read and written, both counted

    @property
    def total(self) -> int:
        return self.read + self.updated


def measure_limits(device: torch.device, dtype: torch.dtype, *, num_bytes: int | None = None) -> MachineLimits:
    """Measures with buffers of `num_bytes` (None: 512 MiB, 4 GiB on CUDA), many times the size of any cache."""
    on_cuda = device.type == "cuda"
    num_bytes = num_bytes or (2**32 if on_cuda else 2**29)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    side = int(min(8192 if on_cuda else 2048, num_bytes**0.5 / 4))
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return MachineLimits(
        read_gb_s=1e-9 * source.nbytes / best_seconds(source.amax, device),
        copy_gb_s=2e-9 * source.nbytes / best_seconds(lambda: target.copy_(source), device),
        gemm_gflop_s=2e-9 * side**3 / best_seconds(lambda: linear(left, right), device),
    )


def best_seconds(function: Callable[[], Any], device: torch.device, *, num_calls: int = 1) -> float:
    """Seconds of a call, the least of several rounds of `num_calls`, after one that is not counted."""

    def round_seconds() -> float:
        start = time.perf_counter()
        for _ in range(num_calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / num_calls

    round_seconds()
    return min(round_seconds() for _ in range(NUM_ROUNDS))


def decode_traffic(
    model: HybridModel, num_rows: int, context_len: float, kv_slot_bytes: int, state_slot_bytes: int
) -> Traffic:
    """Of one decode step of `num_rows` rows with `context_len` tokens each."""
    keys = int(num_rows * context_len * kv_slot_bytes)
    return Traffic(weight_bytes(model, num_rows) + keys, 2 * num_rows * state_slot_bytes)


def weight_bytes(model: HybridModel, num_tokens: int) -> int:
    """Bytes of the weights that a step over so many tokens reads.

    Of an embedding that is no output layer, the tokens' rows; of a layer with experts, as many as the tokens choose if
    they all choose different ones.
    """
    weights, spec = model.weights, model.spec
    total = sum(tensor.nbytes for tensor in _tensors((weights.lm_head, weights.final_norm_D)))
    if weights.embedding_VD.data_ptr() != weights.lm_head.weight_OI.data_ptr():
        total += num_tokens * weights.embedding_VD[0].nbytes
    for depth, block in enumerate(spec.blocks):
        of_block = weights.blocks[spec.weights_key(depth)]
        total += sum(tensor.nbytes for tensor in _tensors(of_block))
        experts = of_block.feed_forward
        if isinstance(experts, MoeWeights):
            top_k = block.feed_forward.router.top_k  # type: ignore[union-attr]
            idle = 1 - min(1.0, num_tokens * top_k / len(experts.gate_up_EFD))
            total -= int(idle * (experts.gate_up_EFD.nbytes + experts.down_EDF.nbytes))
    return total


def prefill_flops(model: HybridModel, num_tokens: int) -> float:
    """Of the matrix products and the attention over a prompt from its start, logits of the last token alone.

    The recurrences, a few percent, are left out.
    """
    spec, weights = model.spec, model.weights
    total = 2.0 * weights.lm_head.weight_OI.numel()
    for depth, block in enumerate(spec.blocks):
        of_block = weights.blocks[spec.weights_key(depth)]
        matrices = sum(tensor.numel() for tensor in _tensors(of_block) if tensor.dim() == 2)
        experts = of_block.feed_forward
        if isinstance(experts, MoeWeights):
            top_k = block.feed_forward.router.top_k  # type: ignore[union-attr]
            matrices += top_k * (experts.gate_up_EFD[0].numel() + experts.down_EDF[0].numel())
        total += 2.0 * num_tokens * matrices
        for branch in block.branches:
            total += num_tokens**2 * _attention_channels(branch.mixer)  # 2 flops a pair, over half of all pairs
    return total


def _attention_channels(mixer: object) -> int:
    """Channels of keys and values that each pair of tokens is multiplied over."""
    if isinstance(mixer, AttentionSpec):
        return mixer.num_heads * (mixer.head_dim + mixer.value_dim)
    if isinstance(mixer, MlaSpec):
        return mixer.num_heads * (mixer.key_dim + mixer.shared_key_dim + mixer.value_dim)
    return 0


def _tensors(weights: Any) -> Iterator[Tensor]:
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, Linear):  # a packed copy is read in place of the weight
        yield from (tensor for tensor in (weights.weight_OI, weights.bias_O) if tensor is not None)
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from _tensors(getattr(weights, field.name))
    elif isinstance(weights, Mapping):
        yield from _tensors(tuple(weights.values()))
    elif isinstance(weights, tuple):
        for part in weights:
            yield from _tensors(part)

"""Which form of each operation runs: the one place where twins are chosen.

Every operation has a plain PyTorch form, which is its definition in code and the oracle of the others. Where a
measurement shows that what Inductor makes of it falls short, there is a hand-written twin with the same contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from hybrid_runtime.ops.attention import decode_attention, decode_mla, prefill_attention, prefill_mla
from hybrid_runtime.ops.conv import causal_conv, conv_step
from hybrid_runtime.ops.gdn import gdn_chunked, gdn_step
from hybrid_runtime.ops.kda import kda_chunked, kda_step
from hybrid_runtime.ops.mamba2 import mamba2_chunked, mamba2_step

TensorOp = Callable[..., Tensor]
PairOp = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kernels:
    """One form of each operation; the contracts are those of the functions that `REFERENCE` names."""

    linear: TensorOp
    causal_conv: PairOp
    conv_step: TensorOp
    mamba2_chunked: PairOp
    mamba2_step: TensorOp
    gdn_chunked: PairOp
    gdn_step: TensorOp
    kda_chunked: PairOp
    kda_step: TensorOp
    prefill_attention: TensorOp
    decode_attention: TensorOp
    prefill_mla: TensorOp
    decode_mla: TensorOp


REFERENCE = Kernels(
    linear=functional.linear,
    causal_conv=causal_conv,
    conv_step=conv_step,
    mamba2_chunked=mamba2_chunked,
    mamba2_step=mamba2_step,
    gdn_chunked=gdn_chunked,
    gdn_step=gdn_step,
    kda_chunked=kda_chunked,
    kda_step=kda_step,
    prefill_attention=prefill_attention,
    decode_attention=decode_attention,
    prefill_mla=prefill_mla,
    decode_mla=decode_mla,
)

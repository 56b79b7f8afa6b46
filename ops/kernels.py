"""Which form of each operation runs: the one place where twins are chosen.

Every operation has a plain PyTorch form, which is its definition in code and the oracle of the others. Where a
measurement shows that what Inductor makes of it falls short, there is a hand-written twin with the same contract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_runtime.ops.attention import decode_attention, decode_latents, decode_mla, prefill_attention, prefill_mla
from hybrid_runtime.ops.conv import causal_conv, conv_step
from hybrid_runtime.ops.conv_tree import conv_fold, conv_tree
from hybrid_runtime.ops.draw import draw_tokens
from hybrid_runtime.ops.gdn import gdn_chunked, gdn_step
from hybrid_runtime.ops.gdn_tree import gdn_fold, gdn_tree, gdn_tree_states
from hybrid_runtime.ops.kda import kda_chunked, kda_step
from hybrid_runtime.ops.kda_tree import kda_fold, kda_tree, kda_tree_states
from hybrid_runtime.ops.mamba2 import mamba2_chunked, mamba2_step
from hybrid_runtime.ops.mamba2_tree import mamba2_fold, mamba2_tree, mamba2_tree_states
from hybrid_runtime.ops.moe import moe_feed_forward, moe_feed_forward_gathered, moe_feed_forward_grouped
from hybrid_runtime.ops.tree_attention import tree_attention, tree_mla

_GROUPED_ALIGNMENT = 8  # elements of bfloat16: 16 bytes, of which rows must be a multiple
TensorOp = Callable[..., Tensor]
PairOp = Callable[..., tuple[Tensor, Tensor]]
PoolOp = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """One form of each operation; the contracts are those of the functions that `REFERENCE` names.

    `pack` makes the layout that `linear` reads fastest from each of some weights `[O, I]`: a copy, or None if it reads
    the weight itself.
    """

    pack: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
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
    decode_latents: TensorOp
    prefill_mla: TensorOp
    decode_mla: TensorOp
    moe_feed_forward: TensorOp
    moe_feed_forward_fixed: TensorOp  # the same, with shapes that no routing changes
    draw_tokens: TensorOp
    conv_tree: TensorOp
    conv_fold: PoolOp
    mamba2_tree: TensorOp
    mamba2_fold: PoolOp
    mamba2_tree_states: TensorOp
    gdn_tree: PairOp
    gdn_fold: PoolOp
    gdn_tree_states: TensorOp
    kda_tree: PairOp
    kda_fold: PoolOp
    kda_tree_states: TensorOp
    tree_attention: TensorOp
    tree_mla: TensorOp


def _plain_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`. `packed`, the weight in a form's own layout, is not used."""
    return functional.linear(x, weight_OI, bias_O)


REFERENCE = Kernels(
    pack=lambda weights: [None] * len(weights),
    linear=_plain_linear,
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
    decode_latents=decode_latents,
    prefill_mla=prefill_mla,
    decode_mla=decode_mla,
    moe_feed_forward=moe_feed_forward,
    moe_feed_forward_fixed=moe_feed_forward_gathered,
    draw_tokens=draw_tokens,
    conv_tree=conv_tree,
    conv_fold=conv_fold,
    mamba2_tree=mamba2_tree,
    mamba2_fold=mamba2_fold,
    mamba2_tree_states=mamba2_tree_states,
    gdn_tree=gdn_tree,
    gdn_fold=gdn_fold,
    gdn_tree_states=gdn_tree_states,
    kda_tree=kda_tree,
    kda_fold=kda_fold,
    kda_tree_states=kda_tree_states,
    tree_attention=tree_attention,
    tree_mla=tree_mla,
)


@dataclass(frozen=True)
class SlotCopies:
    """Copies and clears of whole slots in all tensors of a pool."""

    copy: Callable[[Tensor, Tensor], None]  # sources, destinations: int64 `[n]` each; no slot is both
    clear: Callable[[Tensor], None]  # writes zeros to slots, int64 `[n]`


def slot_copies(tensors: Sequence[Tensor], device: torch.device) -> SlotCopies:
    """The form for a device: on CUDA one launch for all tensors, where a loop would take one or two for each."""
    if device.type == "cuda":
        from hybrid_runtime.ops.triton_kernels import SlotTable, clear_slots, copy_slots

        table = SlotTable.of(tensors)
        return SlotCopies(partial(copy_slots, table), partial(clear_slots, table))

    def copy(sources: Tensor, destinations: Tensor) -> None:
        for tensor in tensors:
            tensor[destinations] = tensor[sources]

    def clear(slots: Tensor) -> None:
        for tensor in tensors:
            tensor[slots] = 0

    return SlotCopies(copy, clear)


def compiled_kernels(device: torch.device) -> Kernels:
    """The forms that compiled steps run on a device; what is measured about each is in `profiles/README.md`.

    Prefill runs forms that one compilation serves for every batch. Decode runs twins in C++ on a CPU, where Inductor's
    loops would make copies of states, and in Triton on CUDA. They may be traced at once; `wait_for_kernels` before
    anything runs them. Raises CompilerNotFound on a CPU without a C++ compiler.
    """
    from hybrid_runtime.ops import opaque  # here: eager steps do not need it

    for_any_batch = dataclasses.replace(
        REFERENCE,
        mamba2_chunked=opaque.mamba2_chunked,
        gdn_chunked=opaque.gdn_chunked,
        kda_chunked=opaque.kda_chunked,
        prefill_attention=opaque.prefill_attention,
        prefill_mla=opaque.prefill_mla,
        moe_feed_forward=opaque.moe_feed_forward,
    )
    if device.type == "cpu":
        from hybrid_runtime.ops import cpu_kernels
        from hybrid_runtime.ops.cpu_kernels import tree_twins

        cpu_kernels.start_building()
        return dataclasses.replace(
            for_any_batch,
            pack=_pack_on_cpu,
            linear=_linear_on_cpu,
            mamba2_chunked=cpu_kernels.mamba2_chunked,
            causal_conv=cpu_kernels.causal_conv,
            conv_step=cpu_kernels.conv_step,
            mamba2_step=cpu_kernels.mamba2_step,
            gdn_step=cpu_kernels.gdn_step,
            kda_step=cpu_kernels.kda_step,
            prefill_attention=cpu_kernels.prefill_attention,
            decode_attention=cpu_kernels.decode_attention,
            decode_latents=cpu_kernels.decode_latents,
            decode_mla=cpu_kernels.decode_mla,
            draw_tokens=cpu_kernels.draw_tokens,
            mamba2_tree=tree_twins.mamba2_tree,
            mamba2_fold=tree_twins.mamba2_fold,
            mamba2_tree_states=tree_twins.mamba2_tree_states,
            gdn_tree=tree_twins.gdn_tree,
            gdn_fold=tree_twins.gdn_fold,
            gdn_tree_states=tree_twins.gdn_tree_states,
            kda_tree=tree_twins.kda_tree,
            kda_fold=tree_twins.kda_fold,
            kda_tree_states=tree_twins.kda_tree_states,
            tree_attention=tree_twins.tree_attention,
            tree_mla=tree_twins.tree_mla,
        )
    from hybrid_runtime.ops import triton_kernels

    return dataclasses.replace(
        for_any_batch,
        conv_step=triton_kernels.conv_step,
        mamba2_step=triton_kernels.mamba2_step,
        gdn_step=triton_kernels.gdn_step,
        kda_step=triton_kernels.kda_step,
        decode_attention=triton_kernels.decode_attention,
        decode_latents=triton_kernels.decode_latents,
        decode_mla=triton_kernels.decode_mla,
        draw_tokens=triton_kernels.draw_tokens,
        moe_feed_forward_fixed=_moe_feed_forward_on_cuda,
        tree_attention=triton_kernels.tree_attention,
        tree_mla=triton_kernels.tree_mla,
    )


def wait_for_kernels(device: torch.device, *, trees: bool) -> None:
    """Returns when the forms of `compiled_kernels` can run: on a CPU they may have to be built first.

    `trees`: those over draft trees, too.
    """
    if device.type == "cpu":
        from hybrid_runtime.ops import cpu_kernels
        from hybrid_runtime.ops.cpu_kernels.tree_build import ensure_trees_built

        cpu_kernels.ensure_built()
        if trees:
            ensure_trees_built()


def _moe_feed_forward_on_cuda(x_LD: Tensor, *others: Any) -> Tensor:
    """For the tokens of a verify: gathering the experts of each, they would write gigabytes per layer."""
    has_grouped_products = x_LD.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x_LD.device)[0] >= 9
    *_, down_EDF, _ = others
    is_aligned = all(size % _GROUPED_ALIGNMENT == 0 for size in down_EDF.shape[1:])
    form = moe_feed_forward_grouped if has_grouped_products and is_aligned else moe_feed_forward_gathered
    return form(x_LD, *others)


def _pack_on_cpu(weights: Sequence[Tensor]) -> list[Tensor | None]:
    from hybrid_runtime.ops import cpu_kernels

    pays = [cpu_kernels.packing_pays(weight_OI) for weight_OI in weights]
    packed = iter(cpu_kernels.pack_all([weight_OI for weight_OI, pay in zip(weights, pays, strict=True) if pay]))
    return [next(packed) if pay else None for pay in pays]


def _linear_on_cpu(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    from hybrid_runtime.ops import cpu_kernels

    if packed is None:
        return cpu_kernels.linear(x, weight_OI, bias_O)
    return cpu_kernels.packed_linear(x, packed, weight_OI.shape[0], bias_O)

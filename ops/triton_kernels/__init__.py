"""Triton kernels for CUDA: twins of PyTorch forms in `hybrid_runtime.ops` whose compiled lowering moves more bytes.

Each is an operator whose schema says what it mutates. It reads and writes pools by slot, in place, and its grid follows
from shapes alone, so that it can be compiled into a step and captured. The PyTorch form is its oracle. Importing this
imports Triton. It runs on CUDA, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported).
"""

from hybrid_runtime.ops.triton_kernels.attention import decode_attention, decode_latents, decode_mla
from hybrid_runtime.ops.triton_kernels.conv import conv_step
from hybrid_runtime.ops.triton_kernels.delta_rule import gdn_step, kda_step
from hybrid_runtime.ops.triton_kernels.draw import draw_tokens
from hybrid_runtime.ops.triton_kernels.mamba2 import mamba2_step
from hybrid_runtime.ops.triton_kernels.slot_copies import SlotTable, clear_slots, copy_slots
from hybrid_runtime.ops.triton_kernels.tree_attention import tree_attention, tree_mla

__all__ = [
    "SlotTable",
    "clear_slots",
    "conv_step",
    "copy_slots",
    "decode_attention",
    "decode_latents",
    "decode_mla",
    "draw_tokens",
    "gdn_step",
    "kda_step",
    "mamba2_step",
    "tree_attention",
    "tree_mla",
]

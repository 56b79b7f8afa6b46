"""C++ twins of the operations in `ops/` for CPU tensors: same names, signatures and contracts.

For where Inductor's loops lose on a CPU: a state update by slot index (it writes a temporary and copies that to the
pool), linear layers of few rows, attention that gathers its context, draws that sort. Each twin is an operator of the
namespace `hybrid_runtime_cpu` whose schema states what it mutates, so that a compiled graph keeps it, in place, without
a break.

Nothing is built at import: the first call, or the first trace, builds (see `ensure_built`). Rows of slot 0 are skipped:
their output is zero. What a caller gets wrong raises ValueError before anything is read or written.
"""

from hybrid_runtime.ops.cpu_kernels.build import CompilerNotFound, ensure_built, start_building
from hybrid_runtime.ops.cpu_kernels.packed import pack, pack_all, packed_linear, packing_pays
from hybrid_runtime.ops.cpu_kernels.twins import (
    causal_conv,
    conv_step,
    decode_attention,
    decode_latents,
    decode_mla,
    draw_tokens,
    gdn_step,
    kda_step,
    linear,
    mamba2_chunked,
    mamba2_step,
    prefill_attention,
)

__all__ = [
    "CompilerNotFound",
    "causal_conv",
    "conv_step",
    "decode_attention",
    "decode_latents",
    "decode_mla",
    "draw_tokens",
    "ensure_built",
    "gdn_step",
    "kda_step",
    "linear",
    "mamba2_chunked",
    "mamba2_step",
    "pack",
    "pack_all",
    "packed_linear",
    "packing_pays",
    "prefill_attention",
    "start_building",
]

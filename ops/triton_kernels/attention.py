"""Decode attention over pool slots, split along the context; twins of the decode forms in `ops/attention.py`.

One kernel serves both. Each program reads a split of one row's context once, for all query heads that share its keys,
and leaves a softmax over that split; a second kernel combines the splits of a row.

The grid depends on shapes only. Where a row's splits lie follows on the device from its length, so that a captured
graph serves every length, and a long bound on the context costs nothing but programs that find no split and return.

Shapes: B rows, H query heads, G key-value heads, D key head dim, E key channels behind them that are no values, V value
dim, S splits; of a program: M query heads (padded), T tokens of a block. Latent attention has one key-value head whose
first D key channels are its values: R latent dim = D = V, E rotary dim, C = R + E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from einops import einsum
from torch import Tensor
from torch.library import triton_op, wrap_triton

from hybrid_runtime.ops.ragged import state_dtype_for
from hybrid_runtime.ops.triton_kernels.attention_kernels import combine_kernel, split_kernel
from hybrid_runtime.ops.triton_kernels.launch import dense_rows, is_any_double

NUM_PROCESSORS = 132  # of an H200
MAX_SPLITS = 128
MIN_SPLIT_TOKENS = 64  # a shorter split would cost more in partial results than it brings in parallel reads
MIN_DOT_SIZE = 16  # the smallest side of a matrix product in Triton
MAX_HEADS, MAX_HEADS_WIDE = 32, 16  # query heads of one program; the fewer for operands of more than 16 bits
COMBINE_ELEMENTS = 4096


@triton_op("hybrid_runtime::decode_attention", mutates_args=())
def decode_attention(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token per row, the last of a context of `context_lens_B` (int64, at least 1) tokens.

    Contract of `hybrid_runtime.ops.attention.decode_attention`; the pools are contiguous. Reads each visible key and
    value once (once for each 32 query heads that share it; 16, for wide operands) and keeps `S H (V + 1)` partial
    numbers of a row.
    """
    return attend(
        q_BHD,
        k_pool,
        v_pool,
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
        window=window,
        extra_dim=0,
    )


@triton_op("hybrid_runtime::decode_latents", mutates_args=())
def decode_latents(
    q_BHC: Tensor,
    latent_pool: Tensor,
    latent_dim: int,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """Attention of all heads over one latent per token, `[slots + 1, C]`: the weighted sums of latents `[B, H, R]`."""
    pool_U1C = latent_pool[:, None]
    return attend(
        q_BHC,
        pool_U1C,
        pool_U1C,
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
        window=None,
        extra_dim=latent_pool.shape[1] - latent_dim,
    )


def decode_mla(
    q_nope_BHD: Tensor,
    q_rope_BHE: Tensor,
    latent_pool: Tensor,
    w_k_HDR: Tensor,
    w_v_HVR: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
) -> Tensor:
    """Absorbed latent attention of one new token per row; contract of `hybrid_runtime.ops.attention.decode_mla`.

    The maps into and out of the latent space stay batched matrix products; between them each latent is read once (once
    per 32 heads).
    """
    q_latent_BHR = einsum(q_nope_BHD, w_k_HDR, "b h d, h d r -> b h r")
    o_BHR = decode_latents(
        torch.cat([q_latent_BHR, q_rope_BHE], dim=-1),
        latent_pool,
        w_k_HDR.shape[-1],
        req_to_token,
        request_rows_B,
        context_lens_B,
        max_context_len,
        scale=scale,
    )
    return einsum(o_BHR, w_v_HVR, "b h r, h v r -> b h v")


@dataclass(frozen=True)
class _Tiling:
    """How one launch is cut, from shapes and dtypes alone: tokens of a block, warps and pipeline stages of a program.

    A block's tokens are found through the table, so its keys wait for its slots: of n pipeline stages, (n - 1) // 2 - 1
    blocks are on their way while one is worked on. That is 32 KB of a 16-bit pool for each of two or three programs
    that a processor holds. Products of wider operands run outside the tensor cores and keep them in registers: these
    blocks are the largest that spill none.
    """

    tokens: int
    warps: int
    stages: int
    programs: int  # aimed at, for each processor

    @classmethod
    def of(cls, num_channels: int, block_heads: int, *, is_narrow: bool) -> _Tiling:
        """`num_channels`: what is read of a token for one key-value head; `block_heads`: query heads of a program."""
        if not is_narrow:
            return cls(tokens=16, warps=8, stages=5, programs=4)
        if num_channels <= 256:
            return cls(tokens=64, warps=4, stages=5, programs=4)
        if num_channels <= 512:
            few_heads = block_heads <= 16
            return cls(tokens=32 if few_heads else 16, warps=8, stages=5 if few_heads else 7, programs=4)
        # one program fills a processor; its partial results, written and read, cost as much as 114 tokens of latents
        return cls(tokens=16, warps=8, stages=7, programs=1)


@dataclass(frozen=True)
class _Problem:
    """Sizes of one launch. Where `keys_are_values`, the values are the first `value_dim` channels of the keys."""

    num_rows: int
    num_heads: int
    num_groups: int
    key_dim: int
    extra_dim: int
    value_dim: int
    num_visible: int  # bound on the tokens that a row sees
    window: int | None
    keys_are_values: bool
    is_narrow: bool  # queries, keys and values have one dtype of 16 bits

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def block_heads(self) -> int:
        """Query heads of a program."""
        return min(MAX_HEADS if self.is_narrow else MAX_HEADS_WIDE, _dot_size(self.heads_per_group))

    @property
    def num_head_blocks(self) -> int:
        return self.num_groups * triton.cdiv(self.heads_per_group, self.block_heads)

    @property
    def tiling(self) -> _Tiling:
        values = 0 if self.keys_are_values else self.value_dim
        num_channels = self.key_dim + self.extra_dim + values
        return _Tiling.of(num_channels, self.block_heads, is_narrow=self.is_narrow)

    @property
    def max_splits(self) -> int:
        """Of a row, in a batch of any size."""
        return min(MAX_SPLITS, triton.cdiv(self.num_visible, MIN_SPLIT_TOKENS))

    @property
    def num_splits(self) -> int:
        """Of every row, however long it is. Where the number of rows is dynamic, so is this: no kernel may have been
        compiled for that of some example, and no comparison decides which term it is."""
        wanted = triton.cdiv(
            self.tiling.programs * NUM_PROCESSORS, torch.sym_max(1, self.num_rows * self.num_head_blocks)
        )
        return torch.sym_min(self.max_splits, wanted)

    def constants(self) -> dict[str, int | None]:
        """What both kernels are compiled for."""
        return {
            "WINDOW": self.window,
            "NUM_HEADS": self.num_heads,
            "VALUE_DIM": self.value_dim,
            "MIN_SPLIT_TOKENS": MIN_SPLIT_TOKENS,
        }


def attend(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    request_rows_B: Tensor,
    context_lens_B: Tensor,
    max_context_len: int,
    *,
    scale: float,
    window: int | None,
    extra_dim: int,
    nodes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Both launches. `q_BHD` has all of a key's channels, the extra ones too.

    `nodes`: what the queries see besides the context, which may be empty then: results `[B, H, V]` and logarithms of
    sums `[B, H]`, in state arithmetic.
    """
    for pool in (k_pool, v_pool):
        assert pool.is_contiguous()
    assert req_to_token.stride(1) == 1
    q_BHD, context_lens_B = dense_rows(q_BHD), context_lens_B.contiguous()
    problem = _Problem(
        num_rows=q_BHD.shape[0],
        num_heads=q_BHD.shape[1],
        num_groups=k_pool.shape[1],
        key_dim=k_pool.shape[2] - extra_dim,
        extra_dim=extra_dim,
        value_dim=k_pool.shape[2] - extra_dim if v_pool is k_pool else v_pool.shape[2],
        num_visible=max_context_len if window is None else min(window, max_context_len),
        window=window,
        keys_are_values=v_pool is k_pool,
        is_narrow=q_BHD.dtype == k_pool.dtype == v_pool.dtype and q_BHD.itemsize == 2,
    )
    dtype, shape = state_dtype_for(q_BHD), (problem.num_rows, problem.num_heads, problem.num_splits)
    partial_BHSV = torch.empty(*shape, problem.value_dim, dtype=dtype, device=q_BHD.device)
    log_sum_BHS = torch.empty(shape, dtype=dtype, device=q_BHD.device)
    context = (req_to_token, request_rows_B.contiguous(), context_lens_B)
    _launch_splits(problem, q_BHD, (k_pool, v_pool), context, (partial_BHSV, log_sum_BHS), scale)
    return _launch_combination(problem, partial_BHSV, log_sum_BHS, context_lens_B, nodes, q_BHD.dtype)


def _launch_splits(
    problem: _Problem,
    q_BHD: Tensor,
    pools: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor, Tensor],
    partial: tuple[Tensor, Tensor],
    scale: float,
) -> None:
    """Fills `partial`: results and logarithms of sums of the splits that rows have; the rest stays as it was."""
    tiling = problem.tiling
    wrap_triton(split_kernel)[problem.num_head_blocks, problem.num_splits, problem.num_rows](
        q_BHD,
        *pools,
        *context,
        *partial,
        q_BHD.stride(0),
        context[0].stride(0),
        problem.num_splits,
        SCALE=scale,
        NUM_GROUPS=problem.num_groups,
        KEY_DIM=problem.key_dim,
        EXTRA_DIM=problem.extra_dim,
        KEYS_ARE_VALUES=problem.keys_are_values,
        BLOCK_M=problem.block_heads,
        BLOCK_T=tiling.tokens,
        BLOCK_D=_dot_size(problem.key_dim),
        BLOCK_E=_dot_size(problem.extra_dim),
        BLOCK_V=_dot_size(problem.value_dim),
        NARROW=problem.is_narrow,
        DOUBLE=is_any_double(q_BHD),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **problem.constants(),
    )


def _launch_combination(
    problem: _Problem,
    partial_BHSV: Tensor,
    log_sum_BHS: Tensor,
    context_lens_B: Tensor,
    nodes: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    node_BHV, node_log_sum_BH = (partial_BHSV, log_sum_BHS) if nodes is None else nodes  # where there are none: unread
    value_dim, block_s = problem.value_dim, triton.next_power_of_2(problem.max_splits)
    o_BHV = torch.empty(problem.num_rows, problem.num_heads, value_dim, dtype=dtype, device=partial_BHSV.device)
    block_v = min(triton.next_power_of_2(value_dim), max(1, COMBINE_ELEMENTS // block_s))
    wrap_triton(combine_kernel)[triton.cdiv(value_dim, block_v), problem.num_heads, problem.num_rows](
        partial_BHSV,
        log_sum_BHS,
        context_lens_B,
        node_BHV,
        node_log_sum_BH,
        o_BHV,
        problem.num_splits,
        HAS_NODES=nodes is not None,
        BLOCK_S=block_s,
        BLOCK_V=block_v,
        num_warps=4,
        **problem.constants(),
    )
    return o_BHV


def _dot_size(size: int) -> int:
    return max(MIN_DOT_SIZE, triton.next_power_of_2(size))

"""Random inputs of the gated delta rules, and the checks that every such op must pass against its recurrent definition.

Shapes: L flat tokens, S sequences, R requested states, B rows, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from hybrid_runtime.ops.ragged import RaggedLayout


@dataclass(frozen=True)
class DeltaOp:
    recurrent: Callable[..., tuple[Tensor, Tensor]]
    chunked: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., Tensor]
    decays_per_channel: bool


@dataclass(frozen=True)
class DeltaCase:
    q: Tensor
    k: Tensor
    v: Tensor
    log_a: Tensor
    beta: Tensor
    s0: Tensor
    layout: RaggedLayout

    def tokens(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.log_a, self.beta

    def arguments(self) -> tuple[Tensor | RaggedLayout, ...]:
        return *self.tokens(), self.s0, self.layout

    def to(self, tokens: torch.dtype, state: torch.dtype) -> DeltaCase:
        """With q, k, v in `tokens` and decays, β and states in `state`, as a model hands them over."""
        return replace(
            self,
            q=self.q.to(tokens),
            k=self.k.to(tokens),
            v=self.v.to(tokens),
            log_a=self.log_a.to(state),
            beta=self.beta.to(state),
            s0=self.s0.to(state),
        )


def make_case(
    layout: RaggedLayout,
    *,
    key_heads: int = 2,
    copies: int = 2,
    key_dim: int = 8,
    value_dim: int = 5,
    decay: float = 1.0,
    correlation: float = 0.5,
    max_beta: float = 1.0,
    decays_per_channel: bool,
    seed: int = 0,
) -> DeltaCase:
    """float64 inputs. Most decays are mild and some reach `decay`; `correlation` 1 makes all keys of a head equal.

    Tokens behind the last sequence are NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    num_tokens, num_heads = layout.num_tokens, key_heads * copies
    k_LGK = correlation * randn(1, key_heads, key_dim) + (1 - correlation) * randn(num_tokens, key_heads, key_dim)
    log_a_shape = (num_tokens, num_heads, key_dim) if decays_per_channel else (num_tokens, num_heads)
    case = DeltaCase(
        q=normalize(randn(num_tokens, key_heads, key_dim), dim=-1),
        k=normalize(k_LGK, dim=-1),
        v=randn(num_tokens, num_heads, value_dim),
        log_a=-decay * rand(*log_a_shape) ** 6,
        beta=max_beta * rand(num_tokens, num_heads),
        s0=randn(len(layout.lengths), num_heads, value_dim, key_dim),
        layout=layout,
    )
    for tensor in case.tokens():
        tensor[sum(layout.lengths) :] = math.nan
    return case


@st.composite
def layouts(draw: st.DrawFn, max_length: int = 80) -> RaggedLayout:
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=4))
    positions = [sorted(draw(st.lists(st.integers(1, length), max_size=4))) for length in lengths]
    padding = draw(st.integers(0, 3))
    chunk_size = draw(st.sampled_from([4, 5, 8, 13, 16, 24, 63, 64]))
    return RaggedLayout.build(lengths, positions, num_tokens=sum(lengths) + padding, chunk_size=chunk_size)


@st.composite
def cases(draw: st.DrawFn, op: DeltaOp, max_length: int = 80, max_beta: float = 1.0) -> DeltaCase:
    return make_case(
        draw(layouts(max_length)),
        key_heads=draw(st.integers(1, 2)),
        copies=draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([1, 3, 8, 16])),
        value_dim=draw(st.sampled_from([1, 4, 8])),
        decay=draw(st.sampled_from([0.0, 0.1, 5.0, 200.0, 1e4])),
        correlation=draw(st.sampled_from([0.0, 0.7, 0.99, 1.0])),
        max_beta=max_beta,
        decays_per_channel=op.decays_per_channel,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def magnitude(case: DeltaCase, y_LHV: Tensor, states_RHVK: Tensor) -> float:
    """The largest value, or norm of a row of a state, that the arithmetic of `case` adds up (q and k have norm 1)."""
    num_tokens = sum(case.layout.lengths)
    rows = [case.s0.double().norm(dim=-1), states_RHVK.norm(dim=-1), case.v[:num_tokens].double().abs(), y_LHV.abs()]
    return max(row.max().item() for row in rows if row.numel())


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """NaN counts as infinitely wrong."""
    if not actual.numel():
        return 0.0
    return (actual.double() - expected).abs().nan_to_num(nan=math.inf).max().item()


def check_exact(op: DeltaOp, case: DeltaCase) -> None:
    """float64: chunked and recurrent form agree to 1e-12 of the magnitude."""
    y_LHV, states_RHVK = op.recurrent(*case.arguments())
    fast_y_LHV, fast_states_RHVK = op.chunked(*case.arguments())
    assert fast_y_LHV.dtype == fast_states_RHVK.dtype == torch.float64
    assert fast_states_RHVK.shape == states_RHVK.shape
    tolerance = 1e-12 * magnitude(case, y_LHV, states_RHVK)
    assert largest_error(fast_y_LHV, y_LHV) <= tolerance
    assert largest_error(fast_states_RHVK, states_RHVK) <= tolerance
    assert not fast_y_LHV[sum(case.layout.lengths) :].any()


def check_budget(
    case: DeltaCase,
    truth: tuple[Tensor, Tensor],
    plain: tuple[Tensor, Tensor],
    fast: tuple[Tensor, Tensor],
) -> None:
    """The fast form errs at most twice what the plain form errs in the same dtype, plus a floor.

    The floor is for cases so small that the plain form is right by luck. An inner product of n terms of total magnitude
    m, rounded with unit roundoff u, is typically wrong by sqrt(n) u m. A result of the chunked form passes through four
    in a row: K terms to read the state, Q terms in the solve, Q terms of the scores that weigh u (or of the state's
    update), K terms inside the scores. The output is then rounded once more, to v's dtype.
    """
    y_LHV, states_RHVK = truth
    key_dim, chunk_size = case.k.shape[-1], case.layout.chunk_size
    scale = magnitude(case, y_LHV, states_RHVK)
    arithmetic = 2 * (math.sqrt(key_dim) + math.sqrt(chunk_size)) * torch.finfo(plain[1].dtype).eps / 2 * scale
    output = torch.finfo(case.v.dtype).eps / 2 * y_LHV.abs().max().item()
    assert fast[0].dtype == plain[0].dtype == case.v.dtype
    assert fast[1].dtype == plain[1].dtype
    assert largest_error(fast[0], y_LHV) <= 2 * largest_error(plain[0], y_LHV) + arithmetic + output
    assert largest_error(fast[1], states_RHVK) <= 2 * largest_error(plain[1], states_RHVK) + arithmetic


def check_chunked_budget(op: DeltaOp, case: DeltaCase, tokens: torch.dtype) -> None:
    low = case.to(tokens, torch.float32)
    truth = op.recurrent(*low.to(torch.float64, torch.float64).arguments())
    check_budget(low, truth, op.recurrent(*low.arguments()), op.chunked(*low.arguments()))


def run_steps(op: DeltaOp, case: DeltaCase, pool_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs and final states `[S, H, V, K]` of `case`, one step per token for all sequences that still have one.

    Padding rows lie around them. Slots that no row names are NaN; they and slot 0 must stay as they are, bit for bit.
    """
    layout = case.layout
    num_sequences = len(layout.lengths)
    slots_S = torch.randperm(2 * num_sequences, generator=torch.Generator().manual_seed(1))[:num_sequences] + 1
    pool = torch.full((2 * num_sequences + 2, *case.s0.shape[1:]), math.nan, dtype=pool_dtype)
    pool[0] = 0.5
    pool[slots_S] = case.s0.to(pool_dtype)
    before = pool.clone()
    y_LHV = torch.zeros_like(case.v)
    for t in range(max(layout.lengths)):
        alive = [s for s in range(num_sequences) if t < layout.lengths[s]]
        rows = torch.tensor([0, *(layout.starts[s] + t for s in alive), 0])
        slots_B = torch.tensor([0, *slots_S[alive].tolist(), 0])
        y_BHV = op.step(*(tensor[rows] for tensor in case.tokens()), pool, slots_B)
        assert y_BHV.isfinite().all()
        y_LHV[rows[1:-1]] = y_BHV[1:-1]
    unnamed = torch.ones(len(pool), dtype=torch.bool)
    unnamed[slots_S] = False
    torch.testing.assert_close(pool[unnamed], before[unnamed], rtol=0, atol=0, equal_nan=True)
    return y_LHV, pool[slots_S]


def at_the_ends(case: DeltaCase) -> DeltaCase:
    """`case` with the states at the ends of the sequences requested, in place of its own."""
    layout = RaggedLayout.build(case.layout.lengths, num_tokens=case.layout.num_tokens)
    return replace(case, layout=layout)


def check_step_exact(op: DeltaOp, case: DeltaCase) -> None:
    case = at_the_ends(case)
    y_LHV, states_SHVK = op.recurrent(*case.arguments())
    tolerance = 1e-12 * magnitude(case, y_LHV, states_SHVK)
    stepped_y_LHV, stepped_SHVK = run_steps(op, case, torch.float64)
    assert largest_error(stepped_y_LHV, y_LHV) <= tolerance
    assert largest_error(stepped_SHVK, states_SHVK) <= tolerance


def check_step_budget(op: DeltaOp, case: DeltaCase, tokens: torch.dtype) -> None:
    low = at_the_ends(case).to(tokens, torch.float32)
    truth = op.recurrent(*low.to(torch.float64, torch.float64).arguments())
    check_budget(low, truth, op.recurrent(*low.arguments()), run_steps(op, low, torch.float32))


def check_gradients(op: DeltaOp, case: DeltaCase) -> None:
    """float64: both forms have the same gradients with respect to every input."""
    inputs = [tensor.requires_grad_() for tensor in (*case.tokens(), case.s0)]

    def gradients(form: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        y_LHV, states_RHVK = form(*inputs, case.layout)
        return torch.autograd.grad(y_LHV.square().sum() + states_RHVK.square().sum(), inputs)

    for fast, plain in zip(gradients(op.chunked), gradients(op.recurrent), strict=True):
        assert largest_error(fast, plain) <= 1e-11 * plain.abs().max().item()

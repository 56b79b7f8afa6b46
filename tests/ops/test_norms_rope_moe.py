"""Norms, rotary embedding, routers and experts: against plain formulas in float64, and against transformers' modules.

Shapes: as in the files under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu
from transformers import GraniteMoeHybridConfig, KimiLinearConfig, Qwen3NextConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from hybrid_runtime.ops.moe import (
    moe_feed_forward,
    moe_feed_forward_gathered,
    moe_feed_forward_grouped,
    sigmoid_group_router,
    softmax_topk_router,
)
from hybrid_runtime.ops.norms import gated_rms_norm, l2_norm, rms_norm
from hybrid_runtime.ops.rope import apply_rope, rope_cos_sin, rope_inv_freq

Form = Callable[..., Tensor]

LOW_DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_float64_close(result: Tensor, expected: Tensor) -> None:
    """Tight enough to catch one float32 rounding on the way."""
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


def test_norms_are_their_formulas_in_float64() -> None:
    x, gate, weight = normal(5, 12, seed=0), normal(5, 12, seed=1), normal(12, seed=2)
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    assert_float64_close(rms_norm(x, weight, EPS), weight * normed)
    assert_float64_close(rms_norm(x, weight, EPS, offset=1.0), (1 + weight) * normed)
    assert_float64_close(l2_norm(x, EPS), x / (x.square().sum(-1, keepdim=True) + EPS).sqrt())
    sigmoid = 1 / (1 + (-gate).exp())
    factors: dict[Literal["silu", "sigmoid"], Tensor] = {"silu": gate * sigmoid, "sigmoid": sigmoid}
    for activation, factor in factors.items():
        after = gated_rms_norm(x, gate, weight, EPS, activation=activation, norm_before_gate=True)
        assert_float64_close(after, weight * normed * factor)
        gated = (x * factor).unflatten(-1, (3, 4))
        grouped = (gated / (gated.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2)
        before = gated_rms_norm(x, gate, weight, EPS, activation=activation, norm_before_gate=False, group_size=4)
        assert_float64_close(before, weight * grouped)


def test_gated_norm_rejects_a_group_that_does_not_divide_the_width() -> None:
    x = torch.ones(2, 12)
    with pytest.raises(ValueError, match="group_size=5"):
        gated_rms_norm(x, x, x[0], EPS, activation="silu", norm_before_gate=False, group_size=5)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_norms_are_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    x, gate = normal(7, 48, seed=3, dtype=dtype), normal(7, 48, seed=4, dtype=dtype)
    weight = torch.nn.Parameter(normal(48, seed=5, dtype=dtype), requires_grad=False)

    def module(kind: type[torch.nn.Module], *sizes: int) -> torch.nn.Module:
        built = kind(*sizes, eps=EPS)
        built.weight = weight
        return built

    assert torch.equal(rms_norm(x, weight, EPS), module(granite.GraniteMoeHybridRMSNorm, 48)(x))
    assert torch.equal(rms_norm(x, weight, EPS), module(kimi.KimiLinearRMSNorm, 48)(x))
    assert torch.equal(rms_norm(x, weight, EPS, offset=1.0), module(qwen.Qwen3NextRMSNorm, 48)(x))
    for group_size, expected in ((None, 48), (16, 16)):
        result = gated_rms_norm(x, gate, weight, EPS, activation="silu", norm_before_gate=False, group_size=group_size)
        assert torch.equal(result, module(granite.GraniteMoeHybridRMSNormGated, 48, expected)(x, gate))
    result = gated_rms_norm(x, gate, weight, EPS, activation="silu", norm_before_gate=True)
    assert torch.equal(result, module(qwen.Qwen3NextRMSNormGated, 48)(x, gate))
    result = gated_rms_norm(x, gate, weight, EPS, activation="sigmoid", norm_before_gate=True)
    assert torch.equal(result, module(kimi.KimiLinearRMSNormGated, 48)(x, gate))


def test_l2_norm_is_transformers() -> None:
    x = normal(7, 48, seed=6, dtype=torch.float32)
    assert torch.equal(l2_norm(x, 1e-6), qwen.l2norm(x))
    torch.testing.assert_close(l2_norm(x, 1e-6), kimi.l2norm(x))


@pytest.mark.parametrize("interleaved", [False, True])
@given(seed=st.integers(0, 2**32), num_pairs=st.integers(1, 5), passed=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_rope_turns_each_pair_as_a_complex_number(interleaved: bool, seed: int, num_pairs: int, passed: int) -> None:
    rotary_dim = 2 * num_pairs
    x_LHD = normal(4, 3, rotary_dim + passed, seed=seed)
    positions_L = torch.tensor([0, 1, 77, 100_000])
    inv_freq_F = rope_inv_freq(10_000.0, rotary_dim).double()
    cos_LE, sin_LE = rope_cos_sin(positions_L, inv_freq_F, 1.0, torch.float64)
    y_LHD = apply_rope(x_LHD, cos_LE, sin_LE, interleaved=interleaved)

    first = torch.arange(num_pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else num_pairs)
    angle_LF = positions_L[:, None] * inv_freq_F
    turned_LHF = torch.complex(x_LHD[..., first], x_LHD[..., second]) * torch.exp(1j * angle_LF)[:, None]
    assert_float64_close(y_LHD[..., first], turned_LHF.real)
    assert_float64_close(y_LHD[..., second], turned_LHF.imag)
    assert torch.equal(y_LHD[..., rotary_dim:], x_LHD[..., rotary_dim:])


def test_rope_scales_its_tables() -> None:
    plain = rope_cos_sin(torch.tensor([3]), torch.tensor([0.5, 0.25]), 1.0, torch.float32)
    scaled = rope_cos_sin(torch.tensor([3]), torch.tensor([0.5, 0.25]), 1.5, torch.float32)
    for table, scaled_table in zip(plain, scaled, strict=True):
        assert torch.equal(table * 1.5, scaled_table)


def test_rope_rejects_a_table_wider_than_the_head() -> None:
    table = torch.ones(1, 6)
    with pytest.raises(ValueError, match="rotary dim 6"):
        apply_rope(torch.ones(1, 1, 4), table, table)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.25])
def test_rope_is_transformers_bit_for_bit(dtype: torch.dtype, partial_rotary_factor: float) -> None:
    rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": partial_rotary_factor,
    }
    config = Qwen3NextConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope_parameters)
    embedding = qwen.Qwen3NextRotaryEmbedding(config)
    rotary_dim = int(16 * partial_rotary_factor)
    assert torch.equal(rope_inv_freq(10_000.0, rotary_dim), embedding.inv_freq)

    q_LHD, k_LGD = normal(9, 4, 16, seed=7, dtype=dtype), normal(9, 2, 16, seed=8, dtype=dtype)
    positions_L = torch.arange(5000, 5009)
    cos_LE, sin_LE = rope_cos_sin(positions_L, embedding.inv_freq, embedding.attention_scaling, dtype)
    expected_cos, expected_sin = embedding(q_LHD[None], positions_L[None])
    assert torch.equal(cos_LE, expected_cos[0])
    assert torch.equal(sin_LE, expected_sin[0])
    q_SHLD, k_SGLD = qwen.apply_rotary_pos_emb(
        q_LHD.transpose(0, 1)[None], k_LGD.transpose(0, 1)[None], expected_cos, expected_sin
    )
    assert torch.equal(apply_rope(q_LHD, cos_LE, sin_LE), q_SHLD[0].transpose(0, 1))
    assert torch.equal(apply_rope(k_LGD, cos_LE, sin_LE), k_SGLD[0].transpose(0, 1))


def by_expert(ids_LK: Tensor, weights_LK: Tensor, num_experts: int) -> Tensor:
    """`[L, E]`: each expert's weight, NaN where it is not chosen; independent of the order of the choices."""
    dense_LE = torch.full((len(ids_LK), num_experts), torch.nan, dtype=weights_LK.dtype)
    return dense_LE.scatter(1, ids_LK, weights_LK)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_softmax_router_is_granites(dtype: torch.dtype) -> None:
    router = granite.GraniteMoeHybridTopKRouter(
        GraniteMoeHybridConfig(num_local_experts=9, num_experts_per_tok=3, hidden_size=16, mamba_n_heads=4)
    )
    router.weight.data = normal(9, 16, seed=9, dtype=dtype)
    x_LD = normal(20, 16, seed=10, dtype=dtype)
    _, expected_weights, expected_ids = router(x_LD)
    routing = softmax_topk_router(x_LD @ router.weight.T, 3, normalize=False, softmax_before_topk=False)
    assert torch.equal(routing.expert_ids_LK, expected_ids)
    assert torch.equal(routing.expert_weights_LK, expected_weights)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_softmax_router_is_qwens(dtype: torch.dtype, normalize: bool) -> None:
    router = qwen.Qwen3NextTopKRouter(
        Qwen3NextConfig(num_experts=9, num_experts_per_tok=3, hidden_size=16, norm_topk_prob=normalize)
    )
    router.weight.data = normal(9, 16, seed=11, dtype=dtype)
    x_LD = normal(20, 16, seed=12, dtype=dtype)
    logits_LE, expected_weights, expected_ids = router(x_LD)
    routing = softmax_topk_router(logits_LE, 3, normalize=normalize, softmax_before_topk=True)
    assert torch.equal(routing.expert_ids_LK, expected_ids)
    assert torch.equal(routing.expert_weights_LK, expected_weights)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2), (4, 4)])
def test_sigmoid_router_is_kimis(normalize: bool, num_groups: int, topk_groups: int) -> None:
    config = KimiLinearConfig(
        num_local_experts=12,
        num_experts_per_tok=4,
        hidden_size=16,
        routed_scaling_factor=2.5,
        n_group=num_groups,
        topk_group=topk_groups,
        norm_topk_prob=normalize,
    )
    router = kimi.KimiLinearTopkRouter(config)
    router.weight.data = normal(12, 16, seed=13, dtype=torch.float32)
    router.e_score_correction_bias.copy_(normal(12, seed=14))
    logits_LE, expected_weights, expected_ids = router(normal(20, 16, seed=15, dtype=torch.float32))
    routing = sigmoid_group_router(
        logits_LE,
        router.e_score_correction_bias,
        4,
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalize=normalize,
        scaling=2.5,
    )
    torch.testing.assert_close(
        by_expert(*routing, 12), by_expert(expected_ids, expected_weights, 12), rtol=1e-6, atol=0, equal_nan=True
    )


def test_routers_stay_in_float64() -> None:
    logits_LE = normal(6, 8, seed=16)
    exact = logits_LE.exp() / logits_LE.exp().sum(-1, keepdim=True)
    ids_LK, weights_LK = softmax_topk_router(logits_LE, 2, normalize=False, softmax_before_topk=True)
    assert_float64_close(weights_LK, exact.gather(1, ids_LK))
    ids_LK, weights_LK = sigmoid_group_router(
        logits_LE, torch.zeros(8), 2, num_groups=1, topk_groups=1, normalize=False, scaling=3.0
    )
    assert_float64_close(weights_LK, 3 / (1 + (-logits_LE.gather(1, ids_LK)).exp()))


def plain_experts(x_LD: Tensor, ids_LK: Tensor, weights_LK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, choice by choice; sums in the dtype that each step's operands have."""
    wide = torch.promote_types(x_LD.dtype, torch.float32)
    y_LD = torch.zeros(x_LD.shape, dtype=wide)
    for token, (ids_K, weights_K) in enumerate(zip(ids_LK.tolist(), weights_LK, strict=True)):
        for expert, weight in zip(ids_K, weights_K, strict=True):
            gate_F, up_F = (gate_up[expert] @ x_LD[token]).chunk(2)
            y_LD[token] += weight.to(wide) * (down[expert] @ (silu(gate_F) * up_F)).to(wide)
    return y_LD.to(x_LD.dtype)


@st.composite
def expert_calls(draw: st.DrawFn, expert_dim: int = 3) -> tuple[Tensor, ...]:
    """Operands of `moe_feed_forward` in float64; few experts or many, so that some have no token and some have all."""
    num_tokens, num_experts, seed = draw(st.integers(1, 12)), draw(st.integers(1, 9)), draw(st.integers(0, 2**32))
    top_k = draw(st.integers(1, num_experts))
    ids_LK = normal(num_tokens, num_experts, seed=seed).argsort(-1)[:, :top_k]
    weights_LK = normal(num_tokens, top_k, seed=seed + 1).abs()
    gate_up = normal(num_experts, 2 * expert_dim, 8, seed=seed + 2) / 3
    down = normal(num_experts, 8, expert_dim, seed=seed + 3) / 2
    return normal(num_tokens, 8, seed=seed + 4), ids_LK, weights_LK, gate_up, down


def cast(call: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in call)


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("form", [moe_feed_forward, moe_feed_forward_gathered])
@given(call=expert_calls())
@settings(max_examples=40, deadline=None)
def test_experts_are_the_plain_loop_in_float64(form: Form, call: tuple[Tensor, ...]) -> None:
    result_LD = form(*call, silu)
    assert result_LD.dtype == torch.float64
    torch.testing.assert_close(result_LD, plain_experts(*call), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("form", [moe_feed_forward, moe_feed_forward_gathered])
@given(call=expert_calls())
@settings(max_examples=40, deadline=None)
def test_experts_keep_the_error_budget(form: Form, dtype: torch.dtype, call: tuple[Tensor, ...]) -> None:
    """Both round at the same places; the floor of 1 eps allows for another order of the sums inside the products."""
    assert_experts_keep_the_budget(form, dtype, call)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@given(call=expert_calls(expert_dim=8))
@settings(max_examples=40, deadline=None)
def test_grouped_experts_keep_the_error_budget(dtype: torch.dtype, call: tuple[Tensor, ...]) -> None:
    """Rows of weights are 16 bytes or a multiple, as torch asks."""
    assert_experts_keep_the_budget(moe_feed_forward_grouped, dtype, call)


def assert_experts_keep_the_budget(form: Form, dtype: torch.dtype, call: tuple[Tensor, ...]) -> None:
    call = cast(call, dtype)
    exact_LD = plain_experts(*cast(call, torch.float64))
    result_LD = form(*call, silu)
    assert result_LD.dtype == dtype
    floor = torch.finfo(dtype).eps * exact_LD.abs().max().item()
    assert rms(result_LD - exact_LD) <= 2 * rms(plain_experts(*call) - exact_LD) + floor


@pytest.mark.parametrize("form", [moe_feed_forward, moe_feed_forward_gathered])
@given(call=expert_calls(), other_seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_token_does_not_see_which_tokens_share_its_experts(
    form: Form, call: tuple[Tensor, ...], other_seed: int
) -> None:
    x_LD, ids_LK, weights_LK, gate_up, down = call
    alone_1D = form(x_LD[:1], ids_LK[:1], weights_LK[:1], gate_up, down, silu)
    other_x_LD = torch.cat([x_LD[:1], normal(*x_LD[1:].shape, seed=other_seed)])
    other_ids_LK = torch.cat([ids_LK[:1], ids_LK[1:].roll(1, dims=0)])
    for rest, ids in ((x_LD, ids_LK), (other_x_LD, other_ids_LK)):
        together_LD = form(rest, ids, weights_LK, gate_up, down, silu)
        torch.testing.assert_close(together_LD[:1], alone_1D, rtol=1e-12, atol=1e-12)
    assert torch.equal(form(*call, silu), form(*call, silu))


def test_experts_are_transformers() -> None:
    config = GraniteMoeHybridConfig(
        hidden_size=16, intermediate_size=8, num_local_experts=6, num_experts_per_tok=2, mamba_n_heads=4
    )
    experts = granite.GraniteMoeHybridExperts(config)
    for weight, seed in ((experts.gate_up_proj, 17), (experts.down_proj, 18)):
        weight.data = normal(*weight.shape, seed=seed, dtype=torch.float32) / 3
    x_LD, logits_LE = normal(11, 16, seed=19, dtype=torch.float32), normal(11, 6, seed=20, dtype=torch.float32)
    ids_LK, weights_LK = softmax_topk_router(logits_LE, 2, normalize=False, softmax_before_topk=False)
    with torch.no_grad():
        expected_LD = experts(x_LD, ids_LK, weights_LK)
        for form in (moe_feed_forward, moe_feed_forward_gathered, moe_feed_forward_grouped):
            result_LD = form(x_LD, ids_LK, weights_LK, experts.gate_up_proj, experts.down_proj, silu)
            torch.testing.assert_close(result_LD, expected_LD, rtol=1e-5, atol=1e-6)

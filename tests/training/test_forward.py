"""The forward that training uses computes what the runtime's operator and transformers' model compute.

Shapes: B batch, L tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hybrid_runtime.ops.kda import kda_recurrent
from hybrid_runtime.ops.ragged import RaggedLayout
from hybrid_runtime.training.forward import TrainingForward
from hybrid_runtime.training.kda_batched import CHUNK_SIZE, MIN_LOG_DECAY, kda_batched
from hybrid_runtime.training.model import Size, initial_model

B, H, K, V = 2, 3, 8, 5
LENGTHS = [CHUNK_SIZE, 2 * CHUNK_SIZE, 5 * CHUNK_SIZE]
DECAYS = [0.0, 0.02, 0.5, -MIN_LOG_DECAY]


def random_inputs(length, strongest_decay, seed=0):
    """q, k (normalised), v, log_a in -strongest_decay..0 and beta in 0..1, all float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, length, H, K, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(B, length, H, V, generator=generator, dtype=torch.float64)
    log_a = -strongest_decay * torch.rand(B, length, H, K, generator=generator, dtype=torch.float64)
    beta = torch.rand(B, length, H, generator=generator, dtype=torch.float64)
    return [functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, log_a, beta]


def recurrent(inputs):
    """The runtime's token-by-token definition, over the same batch."""
    v = inputs[2]
    layout = RaggedLayout.build([v.shape[1]] * B)
    state_SHVK = torch.zeros(B, H, V, K, dtype=v.dtype)
    q_LHK, k_LHK, v_LHV, log_a_LHK, beta_LH = (x.flatten(0, 1) for x in inputs)
    y, _ = kda_recurrent(q_LHK, k_LHK, v_LHV, log_a_LHK, beta_LH, state_SHVK, layout)
    return y.view_as(v)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("decay", DECAYS)
def test_outputs_and_gradients_are_those_of_the_recurrence(length, decay):
    inputs = [x.requires_grad_() for x in random_inputs(length, decay)]
    expected, actual = recurrent(inputs), kda_batched(*inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    actual_grads = torch.autograd.grad((actual * weights).sum(), inputs)
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-9, atol=1e-9)


def test_decays_below_the_bound_act_like_the_bound():
    q, k, v, log_a, beta = random_inputs(3 * CHUNK_SIZE, 1.0)
    log_a = torch.where(log_a < -0.9, 1000 * log_a, log_a)
    expected = recurrent([q, k, v, log_a.clamp_min(MIN_LOG_DECAY), beta])
    torch.testing.assert_close(kda_batched(q, k, v, log_a, beta), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("decay", [0.0, 0.02, 0.5, 1.0])
def test_float32_errs_at_most_twice_what_the_recurrence_errs(decay):
    """At decays a trained model uses; at the bound itself the factored exponentials cost about 2.5 times."""
    inputs = [x.float() for x in random_inputs(5 * CHUNK_SIZE, decay)]
    truth = recurrent([x.double() for x in inputs])

    def error(outputs):
        return (outputs - truth).square().mean().sqrt()

    assert error(kda_batched(*inputs)) <= 2 * error(recurrent(inputs))


@pytest.fixture(scope="module")
def small_model():
    model = initial_model(Size(hidden_size=48, intermediate_size=64, num_heads=2, vocab_size=300), seed=0)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.3)
    return model


def test_losses_and_gradients_are_those_of_transformers(small_model):
    ids = torch.randint(2, 300, (2, 4 * CHUNK_SIZE + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    expected = functional.cross_entropy(small_model(inputs).logits.mT, targets, reduction="none")
    actual = TrainingForward(small_model, torch.float32, compiled=False)(inputs, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    parameters = dict(small_model.named_parameters())
    expected_grads = torch.autograd.grad(expected.mean(), list(parameters.values()))
    actual_grads = torch.autograd.grad(actual.mean(), list(parameters.values()))
    for name, a, b in zip(parameters, actual_grads, expected_grads, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm(), name

"""Blocks that no adapter builds yet: parallel branches, single parts, weights shared between depths."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from hybrid_runtime.models.adapters import adapt
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.spec import AttentionSpec, BlockSpec, Branch, ModelSpec
from hybrid_runtime.models.weights import BlockWeights
from tests.parity.driver import Driver, Prompt
from tests.parity.zoo import CASES

TOKENS = [3, 14, 15, 92, 6, 53, 58, 97, 9, 32, 38, 46]
BOUND = 1e-11  # float64; logits are of order 1 to 10, and a wrong term shows at 1e-3 or more


@pytest.fixture(scope="module")
def granite() -> HybridModel:
    """Block 0 is Mamba-2, block 1 attention, each with a dense feed-forward."""
    case = next(case for case in CASES if case.name == "granite-nope")
    return adapt(copy.deepcopy(case.build()).double())


def parts(model: HybridModel, depth: int) -> tuple[BlockSpec, BlockWeights]:
    return model.spec.blocks[depth], model.weights.blocks[model.spec.weights_key(depth)]


def build(model: HybridModel, blocks: list[tuple[BlockSpec, BlockWeights]]) -> HybridModel:
    """The given blocks between the embedding and the head of `model`."""
    spec = dataclasses.replace(model.spec, blocks=tuple(block_spec for block_spec, _ in blocks))
    by_key = {spec.weights_key(depth): block_weights for depth, (_, block_weights) in enumerate(blocks)}
    return HybridModel(spec, dataclasses.replace(model.weights, blocks=by_key))


def prefill(model: HybridModel, tokens: list[int]) -> Tensor:
    driver = Driver(model, max_requests=1, max_len=32, num_state_slots=2, chunk_size=5)
    return driver.prefill(Prompt(driver.start(), tokens))[0]


def decode(model: HybridModel, tokens: list[int]) -> Tensor:
    driver = Driver(model, max_requests=1, max_len=32, num_state_slots=2, chunk_size=5)
    request = driver.start()
    first = driver.prefill(Prompt(request, tokens[:1]))
    return torch.cat([*first, *(driver.decode([request], [token]) for token in tokens[1:])])


def without_feed_forward(block: tuple[BlockSpec, BlockWeights]) -> tuple[BlockSpec, BlockWeights]:
    spec, weights = block
    return (
        dataclasses.replace(spec, feed_forward=None, feed_forward_norm=None),
        dataclasses.replace(weights, feed_forward=None, feed_forward_norm_D=None),
    )


def without_branches(block: tuple[BlockSpec, BlockWeights]) -> tuple[BlockSpec, BlockWeights]:
    spec, weights = block
    return (
        dataclasses.replace(spec, branches=(), branch_norm=None),
        dataclasses.replace(weights, mixers=(), branch_norm_D=None),
    )


def in_parallel(model: HybridModel, attention_output: float) -> tuple[BlockSpec, BlockWeights]:
    """Mamba-2 and attention side by side behind the norm of block 0."""
    (mamba_spec, mamba), (attention_spec, attention) = parts(model, 0), parts(model, 1)
    branches = (
        dataclasses.replace(mamba_spec.branches[0], input_multiplier=0.8),
        dataclasses.replace(attention_spec.branches[0], output_multiplier=attention_output),
    )
    return (
        dataclasses.replace(mamba_spec, branches=branches),
        dataclasses.replace(mamba, mixers=(*mamba.mixers, *attention.mixers)),
    )


def test_single_part_blocks_equal_the_block_they_make_up(granite: HybridModel) -> None:
    whole = [parts(granite, depth) for depth in range(2)]
    halves = [half for block in whole for half in (without_feed_forward(block), without_branches(block))]
    model = build(granite, halves)
    assert (len(model.kv_layers()), len(model.state_layers())) == (1, 1)
    torch.testing.assert_close(prefill(model, TOKENS), prefill(build(granite, whole), TOKENS), rtol=0, atol=BOUND)


def test_parallel_branches_add_up(granite: HybridModel) -> None:
    """In front of the head alone, the residual stream is linear in a branch's output multiplier."""

    def stream(attention_output: float) -> Tensor:
        """The residual stream behind the block, from logits of a model without final norm and head."""
        model = build(granite, [without_feed_forward(in_parallel(granite, attention_output))])
        driver = Driver(model, max_requests=1, max_len=32, num_state_slots=2, chunk_size=5)
        seen: list[Tensor] = []
        model.logits = lambda x_ND: seen.append(x_ND) or x_ND  # type: ignore[method-assign, func-returns-value]
        driver.prefill(Prompt(driver.start(), TOKENS))
        return seen[0]

    without, once, twice = stream(0.0), stream(1.0), stream(2.0)
    assert float((once - without).abs().max()) > 1e-2
    torch.testing.assert_close(twice - without, 2 * (once - without), rtol=0, atol=BOUND)
    alone = without_feed_forward(parts(granite, 0))
    scaled = dataclasses.replace(alone[0].branches[0], input_multiplier=0.8)
    model = build(granite, [(dataclasses.replace(alone[0], branches=(scaled,)), alone[1])])
    both = build(granite, [without_feed_forward(in_parallel(granite, 0.0))])
    torch.testing.assert_close(prefill(model, TOKENS), prefill(both, TOKENS), rtol=0, atol=BOUND)


def test_parallel_branches_decode_as_they_prefill(granite: HybridModel) -> None:
    model = build(granite, [in_parallel(granite, 0.7), in_parallel(granite, 1.3)])
    assert (len(model.kv_layers()), len(model.state_layers())) == (2, 2)
    torch.testing.assert_close(decode(model, TOKENS), prefill(model, TOKENS), rtol=0, atol=BOUND)


def test_depths_that_share_weights_have_their_own_memory(granite: HybridModel) -> None:
    """Equal to the same blocks with their weights listed twice."""
    mamba, attention = parts(granite, 0), parts(granite, 1)
    twice = build(granite, [mamba, attention, mamba, attention])
    shared = [
        (dataclasses.replace(spec, shared_weights=key), weights)
        for (spec, weights), key in ((mamba, "m"), (attention, "a"), (mamba, "m"), (attention, "a"))
    ]
    model = build(granite, shared)
    assert set(model.weights.blocks) == {"m", "a"}
    assert (len(model.kv_layers()), len(model.state_layers())) == (2, 2)
    assert model.blocks[0] is model.blocks[2]
    torch.testing.assert_close(prefill(model, TOKENS), prefill(twice, TOKENS), rtol=0, atol=BOUND)
    torch.testing.assert_close(decode(model, TOKENS), prefill(model, TOKENS), rtol=0, atol=BOUND)


def test_shared_weights_need_equal_specs(granite: HybridModel) -> None:
    blocks = [(dataclasses.replace(parts(granite, d)[0], shared_weights="one"), parts(granite, 0)[1]) for d in (0, 1)]
    with pytest.raises(ValueError, match="'one' have different specs"):
        build(granite, blocks)


def test_a_window_hides_what_lies_behind_it(granite: HybridModel) -> None:
    spec, weights = parts(granite, 1)
    attention = spec.branches[0].mixer
    assert isinstance(attention, AttentionSpec)
    windowed = dataclasses.replace(spec, branches=(Branch(dataclasses.replace(attention, window=4)),))
    model = build(granite, [(windowed, weights)])
    torch.testing.assert_close(prefill(model, TOKENS)[-1], prefill(model, TOKENS[-4:])[-1], rtol=0, atol=BOUND)
    assert float((prefill(model, TOKENS)[-1] - prefill(model, TOKENS[-3:])[-1]).abs().max()) > 1e-3
    torch.testing.assert_close(decode(model, TOKENS), prefill(model, TOKENS), rtol=0, atol=BOUND)


def test_a_part_without_its_norm_is_refused(granite: HybridModel) -> None:
    spec: ModelSpec = granite.spec
    with pytest.raises(ValueError, match="branch_norm"):
        dataclasses.replace(spec.blocks[0], branch_norm=None)
    with pytest.raises(ValueError, match="feed_forward_norm"):
        dataclasses.replace(spec.blocks[0], feed_forward_norm=None)

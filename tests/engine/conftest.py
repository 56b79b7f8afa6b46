"""Runtimes over one small model, and what prompts give alone in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from hybrid_runtime import HybridRuntime
from tests.engine.helpers import assert_idle, greedy, random_tokens, runtime_of
from tests.engine.loop_helpers import LONG, OPTIONS, PROMPTS
from tests.engine.saved_caches import fill
from tests.parity.zoo import CASES


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """Mamba-2 and attention, in float32; shared by all tests, which must not change it."""
    return next(case for case in CASES if case.name == "granite-nope").build()


@pytest.fixture
def make(model: PreTrainedModel) -> Iterator[Callable[..., HybridRuntime]]:
    """Builds runtimes; at the end of the test each must be idle, with balanced pools and no lock held."""
    made: list[HybridRuntime] = []

    def build(**options: Any) -> HybridRuntime:
        made.append(HybridRuntime(model, **{**OPTIONS, **options}))
        return made[-1]

    yield build
    for rt in made:
        if not rt._is_closed:
            rt.prefix_cache.check()
            assert_idle(rt)


@pytest.fixture
def rt(make: Callable[..., HybridRuntime]) -> HybridRuntime:
    return make()


@pytest.fixture(scope="session")
def reference(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """What each of `PROMPTS` gives with `LONG`, alone in a runtime of its own."""
    tokens = []
    for prompt in PROMPTS:
        with HybridRuntime(model, **OPTIONS) as rt:
            tokens.append(rt.generate(prompt, **LONG)[0].outputs[0].token_ids)
    assert len(set(tokens)) == len(PROMPTS)
    return tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a runtime on the Mamba-2 model that ran the prompts."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    with runtime_of("mamba2", min_saving=1) as rt:
        fill(rt)
        rt.save_prefix_cache(path)
    return path


@pytest.fixture(scope="module")
def reader() -> Any:
    """A runtime with a host tier that has something of its own cached in both, to load into."""
    with runtime_of(
        "mamba2", num_kv_slots=200, num_state_slots=5, max_model_len=60, host_cache_bytes=1_000_000, min_saving=1
    ) as rt:
        rng = np.random.default_rng(12)
        for _ in range(4):
            rt.generate(random_tokens(rng, 15), greedy(2))
        yield rt

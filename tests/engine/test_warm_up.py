"""What a warm-up does not do. On a real model."""

from __future__ import annotations

import pytest

from tests.engine.helpers import assert_idle, runtime_of


@pytest.mark.parametrize("length", [1, 30])
def test_a_warm_up_samples_nothing(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prefill, and in a decode row, too."""

    def refuse(*args: object) -> None:
        raise AssertionError("a token was sampled")

    monkeypatch.setattr("hybrid_runtime.engine.runner.sample", refuse)
    with runtime_of("mamba2") as rt:
        rt.warmup(list(range(3, 3 + length)))
        assert rt.prefix_cache.num_state_slots == (1 if length == 1 else 2)
        assert_idle(rt)

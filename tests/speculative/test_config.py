"""SpeculativeConfig: defaults, checks, the size of a tree."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_runtime import RuntimeConfig, SpeculativeConfig
from hybrid_runtime.speculative_config import max_num_draft_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "eagle"),
        ("method", None),
        ("num_steps", 0),
        ("num_steps", 64),
        ("num_steps", True),
        ("num_steps", 3.0),
        ("num_steps", None),
        ("topk", 0),
        ("topk", 64),
        ("topk", "4"),
        ("num_draft_tokens", 1),
        ("num_draft_tokens", 65),
        ("num_draft_tokens", math.inf),
        ("rollback", "undo"),
        ("rollback", None),
        ("mtp_path", ""),
        ("mtp_path", 3),
        ("ngram_min", 0),
        ("ngram_max", None),
        ("adaptive", 1),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        SpeculativeConfig(**{"method": "mtp", field: value})
    assert repr(value) in str(error.value)


def test_a_tree_larger_than_its_candidates_is_refused_with_the_arithmetic():
    assert SpeculativeConfig("mtp", topk=4, num_draft_tokens=37).tree_size == 37
    with pytest.raises(ValueError, match=r"num_draft_tokens=38 .* 1 \+ 4 \+ \(3 - 1\) \* 4² = 37"):
        SpeculativeConfig("mtp", topk=4, num_draft_tokens=38)
    with pytest.raises(ValueError, match=r"num_draft_tokens=5 .* = 4"):
        SpeculativeConfig("ngram", num_draft_tokens=5)


@pytest.mark.parametrize(
    ("topk", "num_steps", "size"), [(1, 1, 2), (1, 3, 4), (1, 63, 64), (2, 1, 3), (2, 3, 11), (4, 3, 16), (8, 5, 16)]
)
def test_the_size_of_a_tree_without_num_draft_tokens(topk, num_steps, size):
    config = SpeculativeConfig("mtp", topk=topk, num_steps=num_steps)
    assert config.num_draft_tokens is None
    assert config.tree_size == size


def test_the_largest_tree_is_what_the_steps_give():
    for topk in range(1, 6):
        for num_steps in range(1, 6):
            # Every step but the first expands the best topk nodes of the level before, each into topk.
            levels = [topk, *([topk * topk] * (num_steps - 1))]
            assert max_num_draft_tokens(topk, num_steps) == 1 + sum(levels)


def test_the_lengths_of_an_ngram_are_in_order():
    with pytest.raises(ValueError, match="ngram_min=5 is more than ngram_max=4"):
        SpeculativeConfig("ngram", ngram_min=5)


def test_only_a_head_has_a_path():
    assert SpeculativeConfig("mtp", mtp_path=Path("head.safetensors")).mtp_path == "head.safetensors"
    with pytest.raises(ValueError, match=r"mtp_path='head\.safetensors' needs method='mtp'"):
        SpeculativeConfig("ngram", mtp_path="head.safetensors")


def test_numpy_integers_become_plain_ones():
    given: dict[str, Any] = {"topk": np.int8(8), "num_steps": np.int8(5)}
    config = SpeculativeConfig("mtp", **given)
    assert (type(config.topk), type(config.num_steps)) == (int, int)


def test_a_config_is_not_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculativeConfig("mtp").topk = 2  # type: ignore[misc]


def test_a_runtime_takes_one_or_none():
    assert RuntimeConfig().speculative is None
    config = SpeculativeConfig("ngram")
    assert RuntimeConfig.with_overrides(None, {"speculative": config}).speculative is config
    for value in ("ngram", {"method": "ngram"}, True):
        wrong: dict[str, Any] = {"speculative": value}
        with pytest.raises(ValueError, match="speculative must be a SpeculativeConfig or None") as error:
            RuntimeConfig(**wrong)
        assert repr(value) in str(error.value)

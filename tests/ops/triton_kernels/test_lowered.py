"""Compiled into a step for a GPU, a kernel is one launch that leaves pools in place, with no copies around it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lowering.processes import must_run

LAUNCHES = {
    "mamba2_step": 1,
    "gdn_step": 1,
    "kda_step": 1,
    "conv_step": 1,
    "decode_attention": 3,  # the new keys and values are written, then the splits, and their combination
    "decode_mla": 6,  # as above, a product on either side, and the queries joined
    "copy_slots": 1,
    "draw_tokens": 1,
}
POOLS = {"decode_attention": ["k", "v"], "decode_mla": ["latent"], "mamba2_step": ["ssm"], "conv_step": ["conv"]}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """What `profiles/kernel_bytes.py` says of each kernel; the device is pretended, in a process of its own."""
    lines = must_run("-W", "ignore", "profiles/kernel_bytes.py", "--kernels-only", "--json").splitlines()
    found = [json.loads(line) for line in lines]
    return {row["name"].partition(",")[0]: row for row in found}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_compiled_kernel_leaves_pools_in_place(rows: dict[str, dict[str, Any]], name: str) -> None:
    """The report finds no copy of a pool, no spill, no wait for the device and nothing else that can't be captured."""
    kernel = rows[name]["kernel"]
    assert kernel["refusal"] is None
    assert kernel["findings"] == []
    assert kernel["launches"] == LAUNCHES[name]
    if name in POOLS:
        assert kernel["mutated"] == POOLS[name]


@pytest.mark.parametrize("name", ["mamba2_step", "gdn_step", "kda_step", "conv_step", "copy_slots", "draw_tokens"])
def test_it_moves_no_more_than_is_needed(rows: dict[str, dict[str, Any]], name: str) -> None:
    """To the report a kernel moves its operands, results and slots: what this can find are copies of operands."""
    row = rows[name]
    assert row["kernel"]["moved"] <= 1.01 * row["needed"]

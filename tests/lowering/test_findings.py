"""Each planted fault is found, as what it is; sound steps give no finding."""

from __future__ import annotations

import pytest
import torch

from hybrid_runtime.graphs.lowering.step import PoolArgument
from tests.lowering.planted import FAULTS, SOUND, B, Case, D


def kinds(report):
    return {finding["kind"] for finding in report["findings"]}


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_a_planted_fault_is_found_as_what_it_is(case: Case, reports):
    assert kinds(reports[case.name]) == set(case.expected)


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_a_sound_step_gives_no_finding(case: Case, reports):
    report = reports[case.name]
    assert report["findings"] == []
    assert report["refusal"] is None
    assert report["num_kernel_launches"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("item", "waits for values of the device"),
        ("boolean_mask", "boolean mask"),
        ("cpu_tensor", "works on a CPU tensor"),
        ("host_to_device", "copies between host and device"),
        ("random_numbers", "a generator that a graph does not advance"),
        ("counter", "became aten.mul.Tensor"),
        ("viewed_pool", "allocates 65792 bytes"),  # the whole stacked pool, in float32
        ("spilling_kernel", "bytes stored"),
    ],
)
def test_a_finding_says_what_happens(name, said, reports):
    assert any(said in finding["detail"] for finding in reports[name]["findings"])


def test_a_step_that_cannot_be_lowered_says_why(reports):
    assert "data-dependent" in reports["branch_on_data"]["refusal"]


def test_a_pool_that_is_updated_in_place_counts_its_rows(reports):
    """`in_place` gathers and scatters B rows of D floats, and writes B sums; the slots are int64."""
    report = reports["in_place"]
    rows = 4 * B * D
    assert report["mutated"] == ["pool"]
    assert sum(kernel["num_read"] for kernel in report["kernels"]) >= 2 * rows  # of the pool, and x
    for kernel in report["kernels"]:
        assert kernel["num_written"] <= 2 * rows + 4 * B
        assert kernel["num_read"] <= 2 * rows + 8 * B


def test_a_hand_written_kernel_counts_the_rows_it_is_said_to_touch(reports):
    (kernel,) = [each for each in reports["kernel_on_the_whole_pool"]["kernels"] if "_add_rows" in each["name"]]
    rows = 4 * B * D
    assert kernel["num_read"] == 2 * rows + 8 * B  # of the pool and of x, and the slots
    assert kernel["num_written"] == rows


@pytest.mark.parametrize("slots", [256, 258, 251, 1])
def test_a_pool_needs_a_prime_number_of_slots(slots):
    with pytest.raises(ValueError, match=f"state has {slots} slots"):
        PoolArgument("state", torch.zeros(slots, 2), 1)

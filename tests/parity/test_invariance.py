"""How a text is cut into steps, and what runs beside it, must not show: all in float64, where only rounding differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.driver import Driver, Prompt, Request
from tests.parity.runs import Run, run
from tests.parity.zoo import CASES, Case

cases = pytest.mark.parametrize("case", CASES, ids=str)

NUM_TOKENS = 44  # more than one chunk of the odd sizes below, few enough to try every split
CHUNK_SIZE = 12


def driver_of(made: Run, **options: int) -> Driver:
    return Driver(made.ours_64, **{"max_len": 96, "chunk_size": CHUNK_SIZE, **options})


def text_of(made: Run, index: int = 3) -> list[int]:
    return made.texts[index][:NUM_TOKENS]


def assert_same(made: Run, ours: Tensor, expected: Tensor) -> None:
    assert ours.isfinite().all()
    assert float((ours - expected).abs().max()) <= made.float64_bound


def assert_same_states(made: Run, ours: list[Tensor], expected: list[Tensor]) -> None:
    for our, other in zip(ours, expected, strict=True):
        bound = made.relative_float64_bound * max(1.0, float(other.abs().max()))
        assert float((our - other).abs().max()) <= bound


def prefill_whole(made: Run, text: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits and final state of a text prefilled alone in one step."""
    driver = driver_of(made, max_requests=1)
    request = driver.start()
    (logits,) = driver.prefill(Prompt(request, text))
    return logits, driver.states(request.working_slot)


@cases
def test_a_prefill_cut_anywhere_equals_the_whole(case: Case) -> None:
    made = run(case)
    text = text_of(made)
    logits, states = prefill_whole(made, text)
    splits = range(1, NUM_TOKENS)
    driver = driver_of(made, max_requests=len(splits), num_state_slots=len(splits))
    requests = [driver.start() for _ in splits]
    firsts = driver.prefill(*(Prompt(request, text[:split]) for request, split in zip(requests, splits, strict=True)))
    seconds = driver.prefill(*(Prompt(request, text[split:]) for request, split in zip(requests, splits, strict=True)))
    for request, first, second in zip(requests, firsts, seconds, strict=True):
        assert_same(made, torch.cat([first, second]), logits)
        assert_same_states(made, driver.states(request.working_slot), states)


@cases
def test_decoding_a_text_equals_its_prefill(case: Case) -> None:
    made = run(case)
    text = text_of(made)
    logits, states = prefill_whole(made, text)
    driver = driver_of(made, max_requests=1)
    request = driver.start()
    (first,) = driver.prefill(Prompt(request, text[:1]))
    steps = [driver.decode([request], [token]) for token in text[1:]]
    assert_same(made, torch.cat([first, *steps]), logits)
    assert_same_states(made, driver.states(request.working_slot), states)


@cases
def test_rows_do_not_feel_each_other_or_padding(case: Case) -> None:
    """Three texts of uneven lengths, prefilled and decoded together behind padding; each against its solo run."""
    made = run(case)
    texts = [text_of(made, 3)[:25], text_of(made, 4)[:7], text_of(made, 5)]
    driver = driver_of(made)
    requests = [driver.start() for _ in texts]
    prompts = [Prompt(request, text[:-4]) for request, text in zip(requests, texts, strict=True)]
    prefilled = driver.prefill(*prompts, num_padding=5)
    steps = [driver.decode(requests, [text[i] for text in texts], num_padding=2) for i in range(-4, 0)]
    for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
        logits, states = prefill_whole(made, text)
        assert_same(made, torch.cat([prefilled[row], *(step[row : row + 1] for step in steps)]), logits)
        assert_same_states(made, driver.states(request.working_slot), states)
    for layer in (*driver.state_pool.layers, *driver.kv_pool.layers):
        for tensor in layer.values():
            assert tensor[0].isfinite().all(), "padding must leave the null slot finite"


@cases
def test_a_step_writes_only_the_slots_it_was_given(case: Case) -> None:
    made = run(case)
    text = text_of(made)
    driver = driver_of(made)
    others = [driver.start() for _ in range(2)]
    driver.prefill(*(Prompt(other, text[:9]) for other in others))
    before = [driver.states(other.working_slot) for other in others]
    kv_before = [kv_entries(driver, other) for other in others]
    request = driver.start()
    driver.prefill(Prompt(request, text[:20]), num_padding=3)
    driver.decode([request], [text[20]], num_padding=3)
    for other, states, entries in zip(others, before, kv_before, strict=True):
        assert all(map(torch.equal, driver.states(other.working_slot), states))
        assert all(map(torch.equal, kv_entries(driver, other), entries))


def kv_entries(driver: Driver, request: Request) -> list[Tensor]:
    slots = driver.req_to_token[request.row, : request.length].long()
    return [tensor[slots] for layer in driver.kv_pool.layers for tensor in layer.values()]


@cases
def test_states_at_positions_equal_those_of_shorter_prefills(case: Case) -> None:
    """One step yields them for two sequences, one of which continues; each serves as a start for another request."""
    made = run(case)
    text = text_of(made)
    driver = driver_of(made)
    first, second = driver.start(), driver.start()
    driver.prefill(Prompt(first, text[:5]))
    driver.prefill(
        Prompt(first, text[5:], state_lengths=(6, 12, 17, 31)), Prompt(second, text[:30], state_lengths=(1, 12))
    )
    whole_logits, _ = prefill_whole(made, text)
    for request in (first, second):
        for length, slot in request.state_slots.items():
            _, states = prefill_whole(made, text[:length])
            assert_same_states(made, driver.states(slot), states)
    for donor, length in ((first, 17), (second, 12)):
        (logits,) = driver.prefill(Prompt(driver.resume(donor, length), text[length:]))
        assert_same(made, logits, whole_logits[length:])

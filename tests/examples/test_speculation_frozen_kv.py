"""Sections 8.1 and 8.2 of the source document: the drafter reads the target's committed KV, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_runtime import HybridRuntime, SpeculativeConfig
from hybrid_runtime.engine.mtp_drafter import MtpDrafter
from hybrid_runtime.models.loading import TINY_CHECKPOINT
from hybrid_runtime.models.mtp import MTP_FILE, MtpHead, load_mtp
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.speculative.draft import Draft, DraftRow
from tests.examples.speculation_parts import kv_content, pool_content, same_bits

NUM_STEPS = 3
OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "compile": "off",
    "max_num_seqs": 2,
    "num_kv_slots": 80,
    "num_state_slots": 6,
    "max_model_len": 64,
}


@pytest.fixture
def rt() -> Iterator[HybridRuntime]:
    """The bundled model with its head, and a request that is past its first round."""
    config = SpeculativeConfig("mtp", topk=4, num_steps=NUM_STEPS, num_draft_tokens=16)
    with HybridRuntime("tiny", speculative=config, **OPTIONS) as rt:
        rt.add_request("import os\nimport sys\n\n\ndef main():\n", max_tokens=40, temperature=0.0)
        rt.step()
        rt.step()
        yield rt


def drafter_of(rt: HybridRuntime) -> MtpDrafter:
    drafting = rt._engine.scheduler.drafting
    assert drafting is not None
    assert isinstance(drafting.drafter, MtpDrafter)
    return drafting.drafter


def draft(rt: HybridRuntime) -> Draft:
    """What the one request would draft now."""
    request = request_of(rt)
    [result] = drafter_of(rt).draft([DraftRow(request.resident.row, request.tokens[:], 15)])
    return result


def request_of(rt: HybridRuntime) -> Request:
    [request] = rt._engine.scheduler.running
    return request


def committed_slots(rt: HybridRuntime) -> list[int]:
    """KV slots of the tokens that count as computed."""
    request = request_of(rt)
    row = rt._engine.memory.table.slots[request.resident.row]
    return row[: request.num_computed_tokens].tolist()


def all_memory(rt: HybridRuntime) -> list[Tensor]:
    """A copy of every tensor that steps write to."""
    memory, speculative = rt._engine.memory, rt._engine.runner.speculative
    assert speculative is not None
    assert speculative.hidden_RD is not None
    records = [record.clone() for layer in memory.step_memory.record_layers for record in layer.values()]
    table = memory.step_memory.req_to_token.clone()
    return [*kv_content(rt), *pool_content(rt), *records, table, speculative.hidden_RD.clone()]


def test_section_8_2_a_draft_writes_nothing(rt: HybridRuntime) -> None:
    """The document: the draft model does not write to the KV pool, by a context manager that swaps pools.

    Nothing needs to be swapped: the head's attention has queries alone. Not a bit of KV, states, records or table
    changes, so there is nothing to take back when a draft is rejected.
    """
    before, slots = all_memory(rt), rt.stats().kv.free
    assert len(draft(rt)) == 15
    assert same_bits(before, all_memory(rt))
    assert rt.stats().kv.free == slots


def test_section_8_2_a_draft_reads_committed_kv_alone(rt: HybridRuntime) -> None:
    """The document: attention reads the target's existing KV alone, and there is no Mamba layer.

    With NaN in all other KV slots, the rejected nodes' among them, in all states and all records the draft is the
    same. It does read the KV of committed tokens: with NaN in one of these there is nothing to choose from.
    """
    memory, expected, committed = rt._engine.memory, draft(rt), committed_slots(rt)
    others = [slot for slot in range(1, memory.supply.kv.num_slots + 1) if slot not in committed]
    memory.kv_pool.fill(torch.tensor(others), torch.nan)
    memory.state_pool.fill(torch.arange(memory.supply.states.num_slots + 1), torch.nan)
    for layer in memory.step_memory.record_layers:
        for record in layer.values():
            record.fill_(torch.nan)
    drafted = draft(rt)
    assert drafted.token_ids.tolist() == expected.token_ids.tolist()
    assert drafted.parents.tolist() == expected.parents.tolist()
    memory.kv_pool.fill(torch.tensor(committed[3:4]), torch.nan)
    assert len(draft(rt)) == 0


def test_section_8_2_the_position_is_fixed(rt: HybridRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document: the RoPE position is `seq_lens - 1` in each step of a draft.

    Its sequence includes the last sampled token: that is the number of committed tokens, however deep the node. All
    nodes see as many tokens.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    step = MtpHead.step

    def noted(self, token_ids_N, hidden_ND, positions_N, request_rows_N, context_lens_N, *rest) -> Any:
        seen.append((positions_N, context_lens_N))
        return step(self, token_ids_N, hidden_ND, positions_N, request_rows_N, context_lens_N, *rest)

    monkeypatch.setattr(MtpHead, "step", noted)
    draft(rt)
    request = request_of(rt)
    assert request.num_tokens - 1 == request.num_computed_tokens
    assert [len(positions_N) for positions_N, _ in seen] == [1, 4, 4]
    for values_N in (value_N for pair in seen for value_N in pair):
        assert values_N.tolist() == [request.num_computed_tokens] * len(values_N)


def test_section_8_1_the_head_shares_embedding_and_output_map(rt: HybridRuntime) -> None:
    """The document: the head shares the target's embedding and lm_head.

    The head that comes with the bundled model has no weight with the size of the vocabulary, and runs on the target.
    """
    model = rt._engine.runner.model
    head = load_mtp(TINY_CHECKPOINT / MTP_FILE, model)
    assert head.target is model
    assert all(model.spec.vocab_size not in tensor.shape for tensor in head.weights.named_tensors().values())


def test_section_8_6_the_tree_is_left_alone(rt: HybridRuntime) -> None:
    """The document: the radix tree is not modified while drafts are made and verified; all happens in the pools."""
    cache = rt._engine.memory.cache
    nodes = [(node.length, node.kv_slots.tolist(), node.state_slot, node.kv_lock) for node in cache.nodes()]
    for _ in range(4):
        rt.step()
        assert nodes == [(n.length, n.kv_slots.tolist(), n.state_slot, n.kv_lock) for n in cache.nodes()]
    assert rt.stats().speculation is not None
    assert request_of(rt).num_computed_tokens > 20

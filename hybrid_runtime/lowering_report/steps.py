"""The graphs of a model's steps, cut as the engine compiles them, of a decode and of a prefill: what stands before the
layers, one layer of each kind, and what follows them.

Shapes: B rows, L tokens, M tokens whose logits are wanted, D hidden size, R rows of the request table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hybrid_runtime.engine.compiled_steps import choose_tokens, embed_tokens
from hybrid_runtime.graphs.compiled import mark_dynamic
from hybrid_runtime.graphs.lowering.step import Step, Trial
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.lowering_report.fake_inputs import (
    BATCH,
    CONTEXT,
    KV_SLOTS,
    STATE_SLOTS,
    dynamic_draw,
    feed_forward_kind,
    indices,
    kinds_of_layers,
    mixer_kind,
    pools_of,
    tensors_of,
)
from hybrid_runtime.lowering_report.models import build_model
from hybrid_runtime.lowering_report.speculative_steps import speculative_steps
from hybrid_runtime.lowering_report.trial import decode_trial, round_trial
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.kernels import compiled_kernels
from hybrid_runtime.ops.ragged import RaggedLayout

PROMPTS = (96, 160)  # tokens of the sequences of a prefill


def steps_of(architecture: str) -> list[Step]:
    """The steps of a model of this architecture, for a CUDA device, in bfloat16 with float32 states.

    Numbers of rows and tokens are dynamic, as the engine has them, so that one graph serves every batch.
    """
    trial, trial_round = decode_trial(architecture), round_trial(architecture)
    with FakeTensorMode():
        model = build_model(architecture, "cuda", torch.bfloat16)
        model = model.with_kernels(compiled_kernels(model.device))
        kv, state = Pool(model.kv_layers(), KV_SLOTS, "cuda"), Pool(model.state_layers(), STATE_SLOTS, "cuda")
        req_to_token = torch.empty(BATCH + 1, CONTEXT, dtype=torch.int32, device="cuda")
        memory = StepMemory(kv.layers, state.layers, req_to_token)
        return [
            *_decode_steps(f"{architecture} decode", model, memory, trial),
            *_prefill_steps(f"{architecture} prefill", model, memory),
            *speculative_steps(architecture, model, memory, trial_round),
        ]


def _decode_steps(name: str, model: HybridModel, memory: StepMemory, trial: Trial) -> Iterator[Step]:
    inputs, last_token_R = _decode_inputs(), indices(BATCH + 1)
    x_BD = torch.empty(BATCH, model.spec.hidden_size, dtype=model.dtype, device="cuda")
    mark_dynamic([x_BD, *tensors_of(inputs)])
    first = (model, inputs.token_ids_B, inputs.request_rows_B, last_token_R)
    yield Step(f"{name}, first", embed_tokens, first, trial=trial)
    for kind, block, memories in kinds_of_layers(model, memory):
        pools = pools_of(block, memories, kv_rows=BATCH * CONTEXT, state_rows=BATCH)
        yield Step(f"{name}, {kind}", block.decode, (x_BD, inputs, memories), pools)
    last = (model, x_BD, inputs.request_rows_B, last_token_R, dynamic_draw(BATCH))
    yield Step(f"{name}, last", choose_tokens, last)


def _prefill_steps(name: str, model: HybridModel, memory: StepMemory) -> Iterator[Step]:
    inputs = _prefill_inputs()
    x_LD = torch.empty(sum(PROMPTS), model.spec.hidden_size, dtype=model.dtype, device="cuda")
    rows_L, last_token_R = indices(sum(PROMPTS)), indices(BATCH + 1)
    mark_dynamic([x_LD, rows_L, *tensors_of(inputs), *tensors_of(inputs.layout)])
    mark_dynamic([inputs.layout.sequence_chunks_SJ], dim=1)

    first = (model, inputs.token_ids_L, rows_L, last_token_R)
    yield Step(f"{name}, first", embed_tokens, first, is_captured=False)
    seen: set[str] = set()
    for block, memories in zip(model.blocks, model.memories(memory), strict=True):
        mixers, feed_forward = mixer_kind(block.spec), feed_forward_kind(block.spec)
        if block.mixing is not None and mixers not in seen:
            pools = pools_of(block, memories, kv_rows=sum(PROMPTS), state_rows=len(PROMPTS))
            yield Step(f"{name}, {mixers}", block.mixing.prefill, (x_LD, inputs, memories), pools, is_captured=False)
        if block.feed_forward is not None and feed_forward not in seen:
            yield Step(f"{name}, {feed_forward}", block.feed_forward.prefill, (x_LD,), is_captured=False)
        seen |= {mixers, feed_forward}
    x_MD = torch.empty(len(PROMPTS), model.spec.hidden_size, dtype=model.dtype, device="cuda")
    mark_dynamic([x_MD])
    last = (model, x_MD, inputs.logits_rows_M, last_token_R, dynamic_draw(len(PROMPTS)))
    yield Step(f"{name}, last", choose_tokens, last, is_captured=False)


def _decode_inputs() -> DecodeInputs:
    return DecodeInputs(
        token_ids_B=indices(BATCH),
        positions_B=indices(BATCH),
        kv_slots_B=indices(BATCH),
        request_rows_B=indices(BATCH),
        context_lens_B=indices(BATCH),
        max_context_len=CONTEXT,
        working_slots_B=indices(BATCH),
    )


def _prefill_inputs() -> PrefillInputs:
    num_tokens = sum(PROMPTS)
    with unset_fake_temporarily():
        layout = RaggedLayout.build(PROMPTS)  # its shapes depend on values, which fake tensors do not have
    on_host = ("lengths_S", "starts_S")
    tensors = {
        name: torch.empty(real.shape, dtype=real.dtype, device="cpu" if name in on_host else "cuda")
        for name, real in vars(layout).items()
    }
    return PrefillInputs(
        layout=RaggedLayout(**tensors),
        token_ids_L=indices(num_tokens),
        positions_L=indices(num_tokens),
        kv_slots_L=indices(num_tokens),
        request_rows_S=indices(len(PROMPTS)),
        context_lens_S=torch.empty(len(PROMPTS), dtype=torch.int64),
        working_slots_S=indices(len(PROMPTS)),
        state_slots_R=indices(len(PROMPTS)),
        logits_tokens_M=indices(len(PROMPTS)),
        logits_rows_M=indices(len(PROMPTS)),
    )

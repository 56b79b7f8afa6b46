"""The graphs of a model's steps, cut as the engine compiles them, of a decode and of a prefill: what stands before the
layers, one layer of each kind, and what follows them.

Shapes: B rows, L tokens, M tokens whose logits are wanted, D hidden size, R rows of the request table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hybrid_runtime.engine.compiled_steps import choose_tokens, embed_tokens
from hybrid_runtime.graphs.compiled import mark_dynamic
from hybrid_runtime.graphs.lowering.step import PoolArgument, Step, Trial
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory, draw_inputs
from hybrid_runtime.lowering_report.models import build_model
from hybrid_runtime.lowering_report.trial import decode_trial
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.models.block import Block
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import AttentionMixer, MixerMemory
from hybrid_runtime.models.spec import BlockSpec, MoeSpec
from hybrid_runtime.ops.draw import DrawInputs
from hybrid_runtime.ops.kernels import compiled_kernels
from hybrid_runtime.ops.ragged import RaggedLayout

BATCH = 8
CONTEXT = 1024  # tokens that a row attends to at most
PROMPTS = (96, 160)  # tokens of the sequences of a prefill
KV_SLOTS, STATE_SLOTS = 65536, 1020  # with the null slot both are prime, as `PoolArgument` asks


def steps_of(architecture: str) -> list[Step]:
    """The steps of a model of this architecture, for a CUDA device, in bfloat16 with float32 states.

    Numbers of rows and tokens are dynamic, as the engine has them, so that one graph serves every batch.
    """
    trial = decode_trial(architecture)
    with FakeTensorMode():
        model = build_model(architecture, "cuda", torch.bfloat16)
        model = model.with_kernels(compiled_kernels(model.device))
        kv, state = Pool(model.kv_layers(), KV_SLOTS, "cuda"), Pool(model.state_layers(), STATE_SLOTS, "cuda")
        req_to_token = torch.empty(BATCH + 1, CONTEXT, dtype=torch.int32, device="cuda")
        memory = StepMemory(kv.layers, state.layers, req_to_token)
        decode_steps = _decode_steps(f"{architecture} decode", model, memory, trial)
        return [*decode_steps, *_prefill_steps(f"{architecture} prefill", model, memory)]


def _decode_steps(name: str, model: HybridModel, memory: StepMemory, trial: Trial) -> Iterator[Step]:
    inputs, last_token_R = _decode_inputs(), _indices(BATCH + 1)
    x_BD = torch.empty(BATCH, model.spec.hidden_size, dtype=model.dtype, device="cuda")
    mark_dynamic([x_BD, *_tensors(inputs)])
    first = (model, inputs.token_ids_B, inputs.request_rows_B, last_token_R)
    yield Step(f"{name}, first", embed_tokens, first, trial=trial)
    for kind, block, memories in _kinds_of_layers(model, memory):
        pools = _pools(block, memories, kv_rows=BATCH * CONTEXT, state_rows=BATCH)
        yield Step(f"{name}, {kind}", block.decode, (x_BD, inputs, memories), pools)
    last = (model, x_BD, inputs.request_rows_B, last_token_R, _draw_inputs(BATCH))
    yield Step(f"{name}, last", choose_tokens, last)


def _prefill_steps(name: str, model: HybridModel, memory: StepMemory) -> Iterator[Step]:
    inputs = _prefill_inputs()
    x_LD = torch.empty(sum(PROMPTS), model.spec.hidden_size, dtype=model.dtype, device="cuda")
    rows_L, last_token_R = _indices(sum(PROMPTS)), _indices(BATCH + 1)
    mark_dynamic([x_LD, rows_L, *_tensors(inputs), *_tensors(inputs.layout)])
    mark_dynamic([inputs.layout.sequence_chunks_SJ], dim=1)

    first = (model, inputs.token_ids_L, rows_L, last_token_R)
    yield Step(f"{name}, first", embed_tokens, first, is_captured=False)
    seen: set[str] = set()
    for block, memories in zip(model.blocks, model.memories(memory), strict=True):
        mixers, feed_forward = mixer_kind(block.spec), feed_forward_kind(block.spec)
        if block.mixing is not None and mixers not in seen:
            pools = _pools(block, memories, kv_rows=sum(PROMPTS), state_rows=len(PROMPTS))
            yield Step(f"{name}, {mixers}", block.mixing.prefill, (x_LD, inputs, memories), pools, is_captured=False)
        if block.feed_forward is not None and feed_forward not in seen:
            yield Step(f"{name}, {feed_forward}", block.feed_forward.prefill, (x_LD,), is_captured=False)
        seen |= {mixers, feed_forward}
    x_MD = torch.empty(len(PROMPTS), model.spec.hidden_size, dtype=model.dtype, device="cuda")
    mark_dynamic([x_MD])
    last = (model, x_MD, inputs.logits_rows_M, last_token_R, _draw_inputs(len(PROMPTS)))
    yield Step(f"{name}, last", choose_tokens, last, is_captured=False)


def _kinds_of_layers(model: HybridModel, memory: StepMemory) -> Iterator[tuple[str, Block, tuple[MixerMemory, ...]]]:
    """The first layer of each kind, with its part of the pools."""
    seen: set[str] = set()
    for block, memories in zip(model.blocks, model.memories(memory), strict=True):
        kind = " + ".join(filter(None, (mixer_kind(block.spec), feed_forward_kind(block.spec))))
        if kind not in seen:
            seen.add(kind)
            yield kind, block, memories


def mixer_kind(spec: BlockSpec) -> str:
    """What mixes in a layer, in a few words: "mamba2"."""
    return " + ".join(type(branch.mixer).__name__.removesuffix("Spec").lower() for branch in spec.branches)


def feed_forward_kind(spec: BlockSpec) -> str:
    """The feed-forward of a layer, in a word; empty if it has none."""
    if spec.feed_forward is None:
        return ""
    return "moe" if isinstance(spec.feed_forward, MoeSpec) else "mlp"


def _pools(
    block: Block, memories: tuple[MixerMemory, ...], *, kv_rows: int, state_rows: int
) -> tuple[PoolArgument, ...]:
    return tuple(
        PoolArgument(name, tensor, kv_rows if isinstance(mixer, AttentionMixer) else state_rows)
        for mixer, memory in zip(block.mixers, memories, strict=True)
        for name, tensor in memory.tensors.items()
    )


def _tensors(inputs: DecodeInputs | PrefillInputs | RaggedLayout) -> list[Tensor]:
    return [value for value in vars(inputs).values() if isinstance(value, Tensor)]


def _indices(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device="cuda")


def _decode_inputs() -> DecodeInputs:
    return DecodeInputs(
        token_ids_B=_indices(BATCH),
        positions_B=_indices(BATCH),
        kv_slots_B=_indices(BATCH),
        request_rows_B=_indices(BATCH),
        context_lens_B=_indices(BATCH),
        max_context_len=CONTEXT,
        working_slots_B=_indices(BATCH),
    )


def _draw_inputs(num_rows: int) -> DrawInputs:
    draw = draw_inputs(torch.empty(len(DrawInputs._fields), num_rows, dtype=torch.int64, device="cuda"))
    mark_dynamic([option for option in draw if option is not None])
    return draw


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
        token_ids_L=_indices(num_tokens),
        positions_L=_indices(num_tokens),
        kv_slots_L=_indices(num_tokens),
        request_rows_S=_indices(len(PROMPTS)),
        context_lens_S=torch.empty(len(PROMPTS), dtype=torch.int64),
        working_slots_S=_indices(len(PROMPTS)),
        state_slots_R=_indices(len(PROMPTS)),
        logits_tokens_M=_indices(len(PROMPTS)),
        logits_rows_M=_indices(len(PROMPTS)),
    )

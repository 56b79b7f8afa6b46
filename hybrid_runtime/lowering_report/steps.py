"""The steps of a model, as they are given to the report: decode, one layer of each kind of it, and a prefill.

Shapes: B rows, D hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_runtime.graphs.lowering.step import PoolArgument, Step
from hybrid_runtime.graphs.step_inputs import DecodeInputs, PrefillInputs, StepMemory
from hybrid_runtime.lowering_report.models import build_model
from hybrid_runtime.lowering_report.trial import decode_trial
from hybrid_runtime.memory.pools import Pool
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mixers import AttentionMixer, MixerMemory
from hybrid_runtime.models.spec import BlockSpec, MoeSpec
from hybrid_runtime.ops.ragged import RaggedLayout

BATCH = 8
CONTEXT = 1024  # tokens that a decoding row attends to at most
PROMPTS = (96, 160)  # tokens of the sequences of a prefill
KV_SLOTS, STATE_SLOTS = 65536, 1020  # with the null slot both are prime, as `PoolArgument` asks


def steps_of(architecture: str) -> Iterator[Step]:
    """The steps of a model of this architecture, for a CUDA device, in bfloat16 with float32 states."""
    with FakeTensorMode():
        model = build_model(architecture, "cuda", torch.bfloat16)
        kv, state = Pool(model.kv_layers(), KV_SLOTS, "cuda"), Pool(model.state_layers(), STATE_SLOTS, "cuda")
        req_to_token = torch.empty(BATCH + 1, CONTEXT, dtype=torch.int32, device="cuda")
        memory = StepMemory(kv.layers, state.layers, req_to_token)
        decode_inputs = _decode_inputs()
        hidden_BD = torch.empty(BATCH, model.spec.hidden_size, dtype=model.dtype, device="cuda")
        prefill_inputs = _prefill_inputs()

    def decode(inputs: DecodeInputs, memory: StepMemory) -> Tensor:
        return model.decode(inputs, memory).argmax(-1)

    decode_pools = _pools(memory, kv_rows=BATCH * CONTEXT, state_rows=BATCH)
    trial = decode_trial(architecture)
    yield Step(f"{architecture} decode", decode, (decode_inputs, memory), decode_pools, trial=trial)
    yield from _layer_steps(architecture, model, hidden_BD, decode_inputs, memory)

    def prefill(inputs: PrefillInputs, memory: StepMemory) -> Tensor:
        return model.prefill(inputs, memory).argmax(-1)

    prefill_pools = _pools(memory, kv_rows=sum(PROMPTS), state_rows=len(PROMPTS))
    yield Step(f"{architecture} prefill", prefill, (prefill_inputs, memory), prefill_pools, is_captured=False)


def _layer_steps(
    architecture: str, model: HybridModel, hidden_BD: Tensor, inputs: DecodeInputs, memory: StepMemory
) -> Iterator[Step]:
    """Decode of the first layer of each kind, from residual stream to residual stream."""
    kv_layers, state_layers = iter(memory.kv_layers), iter(memory.state_layers)
    seen: set[str] = set()
    for block in model.blocks:
        memories = [
            MixerMemory(next(kv_layers if isinstance(mixer, AttentionMixer) else state_layers), memory.req_to_token)
            for mixer in block.mixers
        ]
        kind = layer_kind(block.spec)
        if kind not in seen:
            seen.add(kind)
            pools = tuple(
                PoolArgument(name, tensor, BATCH * (CONTEXT if isinstance(mixer, AttentionMixer) else 1))
                for mixer, mixer_memory in zip(block.mixers, memories, strict=True)
                for name, tensor in mixer_memory.tensors.items()
            )
            yield Step(f"{architecture} decode, layer {kind}", block.decode, (hidden_BD, inputs, memories), pools)


def layer_kind(spec: BlockSpec) -> str:
    """What a layer is made of, in a few words: "mamba2 + mlp"."""
    mixers = [type(branch.mixer).__name__.removesuffix("Spec").lower() for branch in spec.branches]
    if spec.feed_forward is None:
        return " + ".join(mixers)
    return " + ".join([*mixers, "moe" if isinstance(spec.feed_forward, MoeSpec) else "mlp"])


def _pools(memory: StepMemory, *, kv_rows: int, state_rows: int) -> tuple[PoolArgument, ...]:
    return tuple(
        PoolArgument(f"{name} {depth}", tensor, num_rows)
        for layers, num_rows in ((memory.kv_layers, kv_rows), (memory.state_layers, state_rows))
        for depth, layer in enumerate(layers)
        for name, tensor in layer.items()
    )


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


def _prefill_inputs() -> PrefillInputs:
    num_tokens = sum(PROMPTS)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        layout = RaggedLayout.build(PROMPTS)  # its shapes depend on values, which fake tensors do not have
    tensors = {
        field.name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        for field in dataclasses.fields(layout)
        if isinstance(value := getattr(layout, field.name), Tensor)
    }
    return PrefillInputs(
        layout=dataclasses.replace(layout, **tensors),
        token_ids_L=_indices(num_tokens),
        positions_L=_indices(num_tokens),
        kv_slots_L=_indices(num_tokens),
        request_rows_S=_indices(len(PROMPTS)),
        context_lens=PROMPTS,
        working_slots_S=_indices(len(PROMPTS)),
        state_slots_R=_indices(len(PROMPTS)),
        logits_tokens_M=_indices(len(PROMPTS)),
    )

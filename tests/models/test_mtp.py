"""The frozen-KV head: its step against the definition written out, what it must not read or write, and its file.

Shapes: N nodes, D hidden size, H heads, T context length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.loading import load_model
from hybrid_runtime.models.mixers.attention import GqaMixer
from hybrid_runtime.models.mtp import MtpHead, MtpSpec, MtpWeights, load_mtp, save_mtp
from hybrid_runtime.models.mtp_weights import attention_mixers, tensor_shapes
from hybrid_runtime.ops.kernels import compiled_kernels
from tests.parity.driver import Driver, Prompt, Request
from tests.parity.zoo import CASES

BOUND = 1e-11  # float64; results are of order 1 to 10, and a wrong term shows at 1e-3 or more
# GQA with rotary positions on all or a part of a head's channels, without positions, and latent attention
TARGETS = ["granite-moe-rope", "granite-nope", "granite-attention-only", "qwen", "qwen-sparse-steps", "kimi"]
CONTEXTS = [[3, 14, 15, 92, 6, 53, 58], [97, 9, 32], [38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]]
NODE_REQUESTS = [0, 2, 2, 1, 0]  # several nodes of one request, in no order


def build_target(name: str, dtype: torch.dtype = torch.float64) -> HybridModel:
    model = next(case for case in CASES if case.name == name).build()
    return load_model(model, dtype).hybrid_model


def random_tensors(spec: MtpSpec, target: HybridModel) -> dict[str, Tensor]:
    """Weights under which every part matters: matrices keep variances, norms lie around one. Exact in bfloat16."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in tensor_shapes(spec, target).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        tensors[name] = value.bfloat16().to(target.dtype)
    return tensors


def spec_for(target: HybridModel) -> MtpSpec:
    """Two blocks over the last and the first attention of the target, which may be one and the same."""
    num_layers = len(target.kv_layers())
    return MtpSpec(
        target.spec.hidden_size, num_heads=6, intermediate_size=28, kv_layers=(num_layers - 1, 0), norm_eps=1e-5
    )


class Scene:
    """A target with three requests in its pools, a random head, and nodes that draft for them."""

    def __init__(self, name: str) -> None:
        self.target = build_target(name)
        self.spec = spec_for(self.target)
        self.tensors = random_tensors(self.spec, self.target)
        self.head = MtpHead(self.spec, MtpWeights.of(self.tensors, len(self.spec.kv_layers)), self.target)
        self.driver = Driver(self.target, max_requests=4, max_len=24, num_state_slots=6)
        self.requests: list[Request] = [self.driver.start() for _ in CONTEXTS]
        prompts = (Prompt(request, tokens) for request, tokens in zip(self.requests, CONTEXTS, strict=True))
        self.driver.prefill(*prompts)
        self.tokens_N = torch.tensor([5, 17, 140, 63, 88])
        generator = torch.Generator().manual_seed(3)
        shape = (len(NODE_REQUESTS), self.target.spec.hidden_size)
        self.hidden_ND = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def step(self, num_padding: int = 0, max_context_len: int = 24) -> tuple[Tensor, Tensor]:
        padding = torch.zeros(num_padding, dtype=torch.int64)
        rows_N = torch.tensor([self.requests[index].row for index in NODE_REQUESTS])
        lens_N = torch.cat([torch.tensor([len(CONTEXTS[index]) for index in NODE_REQUESTS]), padding + 1])
        logits_NV, hidden_ND = self.head.step(
            torch.cat([self.tokens_N, padding]),
            torch.cat([self.hidden_ND, self.hidden_ND.new_zeros(num_padding, self.hidden_ND.shape[1])]),
            lens_N,
            torch.cat([rows_N, padding]),
            lens_N,
            max_context_len,
            self.driver.memory,
        )
        return logits_NV[: len(NODE_REQUESTS)], hidden_ND[: len(NODE_REQUESTS)]


def norm(x_D: Tensor, weight_D: Tensor) -> Tensor:
    return x_D / (x_D.pow(2).mean() + 1e-5).sqrt() * weight_D


def rotated(x_D: Tensor, position: int, inv_freq_F: Tensor, scaling: float) -> Tensor:
    """Channels i and i + F as a complex number, turned by the angle of frequency i."""
    num_pairs = len(inv_freq_F)
    turned_F = torch.complex(x_D[:num_pairs], x_D[num_pairs : 2 * num_pairs]) * torch.polar(
        torch.full((num_pairs,), scaling, dtype=torch.float64), position * inv_freq_F.double()
    )
    return torch.cat([turned_F.real, turned_F.imag, x_D[2 * num_pairs :]])


def attend(scene: Scene, layer: int, query: Tensor, request: Request) -> Tensor:
    """What each head gathers of one attention's committed memory, head by head and token by token."""
    mixer = attention_mixers(scene.target)[layer]
    slots = scene.driver.req_to_token[request.row, : request.length].tolist()
    pools = scene.driver.memory.kv_layers[layer]
    gathered = []
    for head, query_K in enumerate(query.chunk(scene.spec.num_heads)):
        if isinstance(mixer, GqaMixer):
            group = head * mixer.spec.num_kv_heads // scene.spec.num_heads
            keys = [pools["k"][slot, group] for slot in slots]
            values = [pools["v"][slot, group] for slot in slots]
            if mixer.spec.rope is not None:
                inv_freq_F = mixer.weights.inv_freq_F
                assert inv_freq_F is not None
                query_K = rotated(query_K, request.length, inv_freq_F, mixer.spec.rope.attention_scaling)
        else:
            keys = [pools["latent"][slot] for slot in slots]
            values = [key[: mixer.spec.latent_dim] for key in keys]  # type: ignore[attr-defined]
        scores = torch.stack([query_K @ key * mixer.spec.scale for key in keys])  # type: ignore[attr-defined]
        weights = (scores - scores.max()).exp()
        gathered.append(sum((w * v for w, v in zip(weights, values, strict=True)), 0 * values[0]) / weights.sum())
    return torch.cat(gathered)


def written_out(scene: Scene, node: int) -> tuple[Tensor, Tensor]:
    """Logits and hidden state of one node, from the definition."""
    t, target, request = scene.tensors, scene.target, scene.requests[NODE_REQUESTS[node]]
    embedded_D = target.weights.embedding_VD[scene.tokens_N[node]] * target.spec.embedding_multiplier
    parts = norm(embedded_D, t["embedding_norm"]), norm(scene.hidden_ND[node], t["hidden_norm"])
    x_D = t["project"] @ torch.cat(parts)
    for index, layer in enumerate(scene.spec.kv_layers):
        b = {name: t[f"blocks.{index}.{name}"] for name in ("query", "output", "gate_up", "down")}
        query = b["query"] @ norm(x_D, t[f"blocks.{index}.attention_norm"])
        x_D = x_D + b["output"] @ attend(scene, layer, query, request)
        gate, up = (b["gate_up"] @ norm(x_D, t[f"blocks.{index}.feed_forward_norm"])).chunk(2)
        x_D = x_D + b["down"] @ (gate * gate.sigmoid() * up)
    logits_V = target.weights.lm_head.weight_OI @ norm(x_D, t["final_norm"])
    return logits_V * target.spec.logits_multiplier, x_D


@pytest.mark.parametrize("name", TARGETS)
def test_a_step_is_its_definition(name: str) -> None:
    """In poisoned pools: whatever is not of a node's own committed context is NaN."""
    scene = Scene(name)
    logits_NV, hidden_ND = scene.step(num_padding=2)
    for node in range(len(NODE_REQUESTS)):
        expected_logits_V, expected_hidden_D = written_out(scene, node)
        torch.testing.assert_close(logits_NV[node], expected_logits_V, rtol=0, atol=BOUND)
        torch.testing.assert_close(hidden_ND[node], expected_hidden_D, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_the_compiled_forms_of_operations_give_the_same(name: str) -> None:
    scene = Scene(name)
    expected = scene.step(num_padding=2)
    scene.head = scene.head.with_target(scene.target.with_kernels(compiled_kernels(torch.device("cpu"))))
    for actual, plain in zip(scene.step(num_padding=2), expected, strict=True):
        torch.testing.assert_close(actual, plain, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_tokens_beyond_the_committed_length_are_not_seen(name: str) -> None:
    """Drafted nodes write K and V of the target behind the committed tokens: the head must not notice."""
    scene = Scene(name)
    expected_logits_NV, expected_hidden_ND = scene.step()
    scene.driver.decode(scene.requests, [1, 2, 3])
    logits_NV, hidden_ND = scene.step()
    assert torch.equal(logits_NV, expected_logits_NV)
    assert torch.equal(hidden_ND, expected_hidden_ND)


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_a_step_writes_nothing(name: str) -> None:
    scene = Scene(name)
    memory = scene.driver.memory
    tensors = [t for layer in (*memory.kv_layers, *memory.state_layers) for t in layer.values()]
    tensors += [memory.req_to_token, scene.tokens_N, scene.hidden_ND]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    scene.step(num_padding=1)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy)


def test_a_head_steps_on_its_own_hidden_states() -> None:
    """A second step reads what the first returned; both its inputs matter."""
    scene = Scene("kimi")
    first_logits_NV, scene.hidden_ND = scene.step()
    second_logits_NV, _ = scene.step()
    torch.testing.assert_close(second_logits_NV[1], written_out(scene, 1)[0], rtol=0, atol=BOUND)
    assert float((second_logits_NV - first_logits_NV).abs().amax(1).min()) > 1e-2
    scene.tokens_N = scene.tokens_N.roll(1)
    assert float((scene.step()[0] - second_logits_NV).abs().amax(1).min()) > 1e-2


@pytest.mark.parametrize("name", ["qwen", "kimi"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_file_gives_the_head_that_was_saved(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = build_target(name, dtype)
    spec = spec_for(target)
    tensors = random_tensors(spec, target)
    save_mtp(tmp_path / "mtp.safetensors", spec, tensors)
    head = load_mtp(tmp_path / "mtp.safetensors", target)
    assert head.spec == spec
    weights, expected = head.weights, MtpWeights.of(tensors, 2)
    assert torch.equal(weights.project.weight_OI, expected.project.weight_OI)
    assert torch.equal(weights.blocks[1].attention.query.weight_OI, expected.blocks[1].attention.query.weight_OI)
    assert torch.equal(weights.blocks[0].feed_forward.down.weight_OI, expected.blocks[0].feed_forward.down.weight_OI)
    assert torch.equal(weights.final_norm_D, expected.final_norm_D)
    assert weights.final_norm_D.dtype == weights.project.weight_OI.dtype == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["mtp.safetensors"]


Damage = Callable[[dict[str, Tensor], dict[str, object]], None]


def _remove(tensors: dict[str, Tensor], fields: dict[str, object]) -> None:
    del tensors["blocks.1.output"]


def _transpose(tensors: dict[str, Tensor], fields: dict[str, object]) -> None:
    tensors["project"] = tensors["project"].T.contiguous()


def _add(tensors: dict[str, Tensor], fields: dict[str, object]) -> None:
    tensors["blocks.2.output"] = torch.zeros(2, 2)


def _set(**changed: object) -> Damage:
    return lambda tensors, fields: fields.update(changed)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_remove, r"the weight blocks\.1\.output is missing"),
        (_transpose, r"the weight project has shape \[80, 40\], not \[40, 80\]"),
        (_add, r"weights that no block uses: blocks\.2\.output"),
        (_set(hidden_size=64), r"hidden_size is 64, but 40 in qwen3_next"),
        (_set(kv_layers=[0, 1]), r"kv_layers names 1, but the attention layers of qwen3_next are 0 to 0"),
        (_set(kv_layers=[-1, 0]), r"kv_layers names -1"),
        (_set(kv_layers=[]), r"kv_layers is empty"),
        (_set(num_heads=5), r"num_heads is 5, no multiple of the 2 KV heads of attention layer 0"),
        (_set(num_heads=0), r"num_heads must be positive, not 0"),
        (_set(novelty=1), r"not the spec of a head: .*novelty"),
        (_set(num_heads="six"), r"not the spec of a head"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(damage: Damage, complaint: str, tmp_path: Path) -> None:
    target = build_target("qwen")
    spec = spec_for(target)
    tensors, fields = random_tensors(spec, target), dataclasses.asdict(spec)
    damage(tensors, fields)
    save_file(tensors, tmp_path / "head.safetensors", metadata={"mtp": json.dumps(fields)})
    with pytest.raises(ValueError, match=r"head\.safetensors: .*" + complaint):
        load_mtp(tmp_path / "head.safetensors", target)


def test_a_target_without_attention_is_refused(tmp_path: Path) -> None:
    kimi = build_target("kimi")
    spec = spec_for(kimi)
    save_mtp(tmp_path / "mtp.safetensors", spec, random_tensors(spec, kimi))
    with pytest.raises(ValueError, match=r"mtp\.safetensors: kimi_linear has no attention layer"):
        load_mtp(tmp_path / "mtp.safetensors", build_target("kimi-dense-kda-only"))


def test_a_file_that_is_no_head_is_refused(tmp_path: Path) -> None:
    target = build_target("kimi")
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*model\.safetensors"):
        load_mtp(path, target)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"model\.safetensors: no multi-token-prediction head"):
        load_mtp(path, target)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        load_mtp(path, target)

"""What the engine benchmark counts is what is there, and it measures what it says."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid_runtime.models.adapters import adapt
from profiles import limits, peer_rows
from tests.parity.zoo import CASES, Case

CASES_BY_NAME = {case.name: case for case in CASES}


def variant(name: str, **options: Any) -> Case:
    case = CASES_BY_NAME[name]
    return Case(name, case.config_class, {**case.options, **options})


@pytest.mark.parametrize("name", ["granite-moe-rope", "granite-attention-only", "qwen", "kimi"])
def test_a_step_reads_each_weight_once(name: str) -> None:
    """Over so many tokens that all experts work: all parameters, but of a separate embedding only the tokens' rows."""
    reference = CASES_BY_NAME[name].build().bfloat16()
    embedding: Any = reference.get_input_embeddings()
    expected = sum(parameter.nbytes for parameter in reference.parameters())
    if not reference.config.tie_word_embeddings:
        expected -= embedding.weight.nbytes - 99 * embedding.weight[0].nbytes
    frequencies_and_biases = sum(buffer.nbytes for buffer in reference.buffers()) * len(reference.model.layers)
    assert expected <= limits.weight_bytes(adapt(reference), 99) <= expected + frequencies_and_biases


def test_few_tokens_read_the_experts_they_choose() -> None:
    reference = variant("granite-moe-rope", num_local_experts=16, num_experts_per_tok=3).build()
    model = adapt(reference)
    experts = sum(parameter.nbytes for name, parameter in reference.named_parameters() if ".experts." in name)
    assert experts
    saved = limits.weight_bytes(model, 99) - limits.weight_bytes(model, 2)
    assert saved == pytest.approx(experts * (1 - 2 * 3 / 16), abs=len(model.blocks))


def test_flops_are_those_of_the_matrix_products() -> None:
    """Beside PyTorch's own counter, which counts all pairs of an attention and not half of them."""
    reference = CASES_BY_NAME["granite-attention-only"].build()
    reference.set_attn_implementation("eager")  # the counter does not know the fused one of a CPU
    num_tokens = 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(torch.arange(num_tokens)[None], logits_to_keep=1, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    assert counts.keys() == {torch.ops.aten.mm, torch.ops.aten.bmm}
    attention = counts[torch.ops.aten.bmm]
    expected = counts[torch.ops.aten.mm] + attention / 2
    assert limits.prefill_flops(adapt(reference), num_tokens) == pytest.approx(expected, rel=1e-3)


def test_a_decode_reads_and_writes_states_and_reads_keys() -> None:
    model = adapt(CASES_BY_NAME["granite-nope"].build())
    traffic = limits.decode_traffic(model, 3, 10.5, kv_slot_bytes=100, state_slot_bytes=7)
    assert traffic.updated == 2 * 3 * 7
    assert traffic.read == limits.weight_bytes(model, 3) + 3150
    machine = limits.MachineLimits(read_gb_s=10, copy_gb_s=5, gemm_gflop_s=1)
    assert machine.seconds(limits.Traffic(2_000_000_000, 1_000_000_000)) == pytest.approx(0.4)


def test_ratios_say_how_much_faster() -> None:
    ours, theirs = {"case": "decode", "batch": 1, "ms_step": 2.0}, {"case": "decode", "batch": 1, "ms_step": 5.0}
    assert peer_rows.speedup(ours, theirs) == 2.5
    assert peer_rows.speedup({"case": "prefill", "tok_s": 300.0}, {"case": "prefill", "tok_s": 100.0}) == 3
    assert peer_rows.speedup(ours, {"case": "decode", "batch": 1, "error": "died"}) is None


def test_the_command_measures_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    bench_engine = importlib.import_module("bench_engine")
    case = variant("granite-nope")
    case.config_class(**{"max_position_embeddings": 512, **case.options}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GraniteMoeHybridForCausalLM"]}))
    peer = {"engine": "other", "case": "decode", "batch": 2, "ms_step": 1e6}
    (tmp_path / "other.jsonl").write_text(f"a line that is no row\n{json.dumps(peer)}\n")
    sizes = "--prompt 40 60 --batch 1 2 --decode-prompt 8 --decode 3 --shared 128 --repeat 1 --buffer-mib 1 --threads 1"
    out = tmp_path / "results" / "bench.json"
    arguments = [*sizes.split(), "--memory-gib", "0.05", "--compile", "off", "--device", "cpu"]
    arguments += ["--config", str(tmp_path), "--peer-json", str(tmp_path / "other.jsonl"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench_engine.py", *arguments])
    bench_engine.main()

    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    names = ["ready", "prefill 40", "prefill 60", "decode 1", "decode 2", "shared 128", "again 128", "partial 128 93"]
    assert [peer_rows.case_of(row) for row in rows] == names
    assert {row["engine"] for row in rows} == {"hybrid_runtime"}
    for row in rows:
        figures = [value for value in row.values() if isinstance(value, float)]
        assert figures
        # Of so few tokens the difference of two runs, which is a decode's time, may well be negative.
        assert all(map(math.isfinite, figures)) if row["case"] == "decode" else min(figures) > 0
    assert "1,000,000.0" in printed
    record = json.loads(out.read_text())
    assert record["figures"]["rows"] == rows
    assert record["figures"]["limits"].keys() == {"read_gb_s", "copy_gb_s", "gemm_gflop_s"}

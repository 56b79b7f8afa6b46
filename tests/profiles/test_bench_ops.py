"""The benchmark of single operations calls forms that agree, on operands of the sizes that it counts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_runtime.ops.kernels import REFERENCE, compiled_kernels
from profiles.op_cases import SHAPES, Maker, OpCase

SMALL = Maker(SHAPES["small"], torch.float32, torch.device("cpu"))


def cases() -> list[OpCase]:
    return [*SMALL.decode_cases(3), *SMALL.prefill_cases()]


def test_granite_is_the_model_of_the_engine_benchmark() -> None:
    config = json.loads((Path(__file__).parents[2] / "profiles/models/granite-h-350m/config.json").read_text())
    shape = SHAPES["granite"]
    assert [shape.hidden, shape.mlp, shape.vocab] == [
        config[key] for key in ("hidden_size", "shared_intermediate_size", "vocab_size")
    ]
    assert [shape.heads, shape.head_dim, shape.state_dim] == [
        config[key] for key in ("mamba_n_heads", "mamba_d_head", "mamba_d_state")
    ]
    assert [shape.query_heads, shape.key_heads] == [config["num_attention_heads"], config["num_key_value_heads"]]
    assert shape.key_dim == config["hidden_size"] // config["num_attention_heads"]
    assert shape.num_depths == config["layer_types"].count("linear_attention")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_forms_agree_on_a_case(case: OpCase) -> None:
    """Else one of them would be called with what it does not take."""
    twin = getattr(compiled_kernels(torch.device("cpu")), case.operation)
    plain = getattr(REFERENCE, case.operation)
    for arguments in case.arguments:
        copies = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
        expected = plain(*arguments, **case.options)
        torch.testing.assert_close(twin(*copies, **case.options), expected, rtol=1e-4, atol=1e-4)


def test_a_state_update_moves_its_rows_states_twice() -> None:
    case = next(case for case in SMALL.decode_cases(3) if case.name == "mamba2_step")
    shape = SHAPES["small"]
    states = 2 * 3 * shape.heads * shape.head_dim * shape.state_dim * 4
    assert states < case.num_bytes < 1.2 * states


def test_the_command_prints_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    bench_ops = importlib.import_module("bench_ops")
    out = tmp_path / "ops.json"
    options = "--shape small --device cpu --threads 1 --batch 2 --forms eager twin --buffer-mib 1 --out"
    monkeypatch.setattr("sys.argv", ["bench_ops.py", *options.split(), str(out)])
    bench_ops.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert json.loads(out.read_text())["figures"]["rows"] == rows
    assert {row["form"] for row in rows} == {"eager", "twin"}
    assert {row["op"] for row in rows} == {case.name for case in cases()}
    assert all(row["us"] > 0 for row in rows)

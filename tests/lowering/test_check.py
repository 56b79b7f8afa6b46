"""The check: what it lets pass, what it names, and the record it reads."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hybrid_runtime.graphs.lowering.check import failures, read_record, write_record
from hybrid_runtime.graphs.lowering.findings import Finding, Kind
from hybrid_runtime.graphs.lowering.report import ExternReport, StepReport, as_json, table
from hybrid_runtime.lowering_report.__main__ import parse_options, publish
from tests.lowering.processes import ROOT, must_run

REPORT = StepReport(
    name="some decode",
    is_captured=True,
    refusal=None,
    kernels=(),
    extern_calls=(ExternReport("extern_kernels.mm", 4, 8_000_000, 2_000_000),),
    allocated=100,
    mutated=("k",),
    findings=(),
    seconds=0.1,
)


def changed(**fields) -> StepReport:
    return dataclasses.replace(REPORT, **fields)


def test_a_step_with_as_many_launches_as_recorded_passes():
    assert failures([REPORT], {"some decode": 4}) == []
    assert failures([REPORT], {"some decode": 5, "another": 1}) == []


def test_one_launch_too_many_fails_with_both_numbers():
    assert failures([REPORT], {"some decode": 3}) == ["some decode: 4 launches, recorded are 3"]


def test_a_step_without_a_record_fails():
    assert failures([REPORT], {}) == ["some decode: 4 launches, and no number is recorded"]


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_finding_fails_and_names_step_place_and_number(kind):
    report = changed(findings=(Finding(kind, "kernel_3", "528 bytes stored"),))
    assert failures([report], {"some decode": 4}) == [f"some decode: {kind}: kernel_3: 528 bytes stored"]


def test_a_captured_step_must_lower_and_another_need_not():
    refused = changed(refusal="it loops", extern_calls=())
    assert failures([refused], {"some decode": 4}) == ["some decode: not lowered: it loops"]
    assert failures([dataclasses.replace(refused, is_captured=False)], {}) == []


def test_the_table_has_numbers_findings_and_refusals():
    finding = Finding(Kind.SPILL, "kernel_3", "528 bytes stored")
    text = table([changed(findings=(finding,)), changed(name="other", is_captured=False, refusal="it loops")])
    assert "8.000" in text
    assert "! spill: kernel_3: 528 bytes stored" in text
    assert "other (not captured): not lowered: it loops" in text


def test_json_has_fields_and_sums():
    (step,) = as_json([REPORT])
    assert step["extern_calls"][0]["num_read"] == step["num_read"] == 8_000_000
    assert (step["num_extern_calls"], step["num_kernel_launches"]) == (4, 0)


def test_a_record_is_read_as_it_was_written_and_keeps_other_steps(tmp_path):
    path = tmp_path / "launches.toml"
    write_record(path, [REPORT, changed(name="refused", refusal="it loops")], {"other": 7, "some decode": 1})
    assert read_record(path) == {"other": 7, "some decode": 4}


def test_a_record_of_another_form_is_refused(tmp_path):
    path = tmp_path / "launches.toml"
    path.write_text('"some decode" = "4"\n')
    with pytest.raises(ValueError, match="'some decode' is '4'"):
        read_record(path)


def test_the_layers_of_a_model_pass_the_check():
    """The whole path: a model of fake weights, its steps, Inductor, the assembler, the record that is committed."""
    output = must_run(
        "-m", "hybrid_runtime.lowering_report", "--models", "granitemoehybrid", "--steps", "decode, m", "--check"
    )
    assert "granitemoehybrid decode, mamba2 + mlp" in output
    assert "_mamba2_step_kernel" in output


def test_the_command_writes_records_and_checks(tmp_path, capsys):
    record, written = tmp_path / "launches.toml", tmp_path / "report.json"

    def run(*arguments: str) -> int:
        return publish([REPORT], parse_options(["--record-file", str(record), *arguments]))

    record.write_text('"some decode" = 3\n')
    assert run("--check") == 1
    assert "some decode: 4 launches, recorded are 3" in capsys.readouterr().err
    assert run() == 0
    assert run("--record", "--json", str(written)) == 0
    assert run("--check") == 0
    assert capsys.readouterr().err == ""
    assert json.loads(written.read_text())["steps"][0]["name"] == "some decode"


def test_every_recorded_step_is_of_a_known_model():
    record = read_record(ROOT / "hybrid_runtime" / "lowering_report" / "launches.toml")
    assert {name.split()[0] for name in record} == {"granitemoehybrid", "kimi_linear", "qwen3_next"}

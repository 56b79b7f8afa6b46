"""RuntimeConfig: defaults, checks, overrides."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hybrid_runtime.config import RuntimeConfig


def test_a_config_is_not_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RuntimeConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("device", "cuda:x"),
        ("device", 0),
        ("dtype", "float16"),
        ("dtype", 32),
        ("state_dtype", "bfloat16"),
        ("state_dtype", None),
        ("kv_dtype", "int8"),
        ("eviction", "fifo"),
        ("eviction", ["lru"]),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 1.0),
        ("max_num_seqs", None),
        ("max_model_len", 0),
        ("max_model_len", math.inf),
        ("max_num_batched_tokens", -1),
        ("num_kv_slots", 0),
        ("num_state_slots", "8"),
        ("memory_bytes", 0),
        ("memory_bytes", 1e9),
        ("enable_prefix_cache", 1),
        ("debug_checks", None),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", False),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        RuntimeConfig(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_devices(device):
    assert RuntimeConfig(device=device).device == device


def test_overrides_replace_fields_and_leave_the_base_alone():
    base = RuntimeConfig(max_num_seqs=4)
    changed = RuntimeConfig.with_overrides(base, {"seed": 7})
    assert (changed.max_num_seqs, changed.seed, base.seed) == (4, 7, 0)
    assert RuntimeConfig.with_overrides(base, {}) is base
    assert RuntimeConfig.with_overrides(None, {}) == RuntimeConfig()


def test_overrides_are_checked():
    with pytest.raises(ValueError, match="max_num_seqs"):
        RuntimeConfig.with_overrides(None, {"max_num_seqs": 0})
    with pytest.raises(ValueError, match="max_num_seq'; did you mean 'max_num_seqs'"):
        RuntimeConfig.with_overrides(None, {"max_num_seq": 1})
    with pytest.raises(ValueError, match=r"'zzz'; the fields are device, "):
        RuntimeConfig.with_overrides(None, {"zzz": 1})
    with pytest.raises(ValueError, match="config"):
        RuntimeConfig.with_overrides({"seed": 1}, {})  # type: ignore[arg-type]


def test_the_data_types_do_not_import_torch():
    modules = ["config", "sampling_params", "outputs", "text.stop", "text.detokenizer"]
    code = "import sys\n" + "\n".join(f"import hybrid_runtime.{name}" for name in modules)
    subprocess.run([sys.executable, "-c", f"{code}\nassert 'torch' not in sys.modules"], check=True)


def test_numpy_integers_become_plain_ones() -> None:
    given: dict[str, Any] = {"num_kv_slots": np.int16(30000), "max_num_seqs": np.int8(100)}
    config = RuntimeConfig(**given)
    assert (type(config.num_kv_slots), type(config.max_num_seqs)) == (int, int)

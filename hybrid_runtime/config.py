"""The options of a runtime."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_runtime.field_checks import (
    INT64_MAX,
    invalid,
    normalize_integers,
    require_bool,
    require_choice,
    require_int,
    require_known,
)
from hybrid_runtime.speculative_config import SpeculativeConfig

DTYPES = ("float32", "bfloat16", "float64")
STATE_DTYPES = ("float32", "float64")  # states accumulate over thousands of tokens: nothing narrower
EVICTION_POLICIES = ("cost", "lru")
COMPILE_MODES = ("auto", "off")
DEFAULT_MIN_SAVING = 32  # tokens

_OPTIONAL_COUNTS = (
    "max_model_len",
    "num_kv_slots",
    "num_state_slots",
    "memory_bytes",
    "checkpoint_interval",
    "track_interval",
)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class RuntimeConfig:
    """What a runtime is built with; never written to afterwards.

    `None` for a size means that the memory plan chooses it. Raises ValueError, naming the field and the value, for a
    value of the wrong type or out of range.

    Fields:
    device: "auto": CUDA where there is one, else the CPU; or "cpu", "cuda", "cuda:<index>"
    dtype: of weights and activations, one of DTYPES; None: as the model
    state_dtype: of the recurrent states in their pool; a float64 model's are float64 anyhow
    kv_dtype: of K and V in their pool, one of DTYPES; None: as `dtype`
    max_num_seqs: rows that run at once
    max_model_len: tokens of prompt and output together; None: the model's limit, if it fits
    max_num_batched_tokens: prefill tokens of one step
    num_kv_slots: tokens that the KV pool holds
    num_state_slots: recurrent states that the state pool holds
    memory_bytes: of both pools together; None: a share of the free memory
    enable_prefix_cache: off: nothing is looked up and nothing is kept
    eviction: "cost": what is expected to save the least goes first; "lru": the least recently used
    host_cache_bytes: of host memory, for what the pools evict; 0: none
    host_cache_path: a file to make for these bytes instead, on a CPU only; scratch space, gone when the runtime is
        closed
    checkpoint_interval: tokens between checkpoints inside a prompt; None: off
    track_interval: decoded tokens between periodic checkpoints; None: off
    min_saving: tokens that a checkpoint at a junction, or waiting for another request, must save
    compile: "auto": steps are compiled by Inductor when the runtime is made; "off": they run operation by operation, as
        the reference and for debugging
    overlap: schedule a step while the one before runs; None: on CUDA only
    speculative: how tokens are drafted, to be verified several at a time; None: they are decoded one by one
    seed: the seeds of requests that bring none are drawn from it
    debug_checks: assert after every step that each slot of both pools has one owner
    """

    device: str = "auto"
    dtype: str | None = None
    state_dtype: str = "float32"
    kv_dtype: str | None = None
    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    num_kv_slots: int | None = None
    num_state_slots: int | None = None
    memory_bytes: int | None = None
    enable_prefix_cache: bool = True
    eviction: str = "cost"
    host_cache_bytes: int = 0
    host_cache_path: str | os.PathLike[str] | None = None
    checkpoint_interval: int | None = None
    track_interval: int | None = 256
    min_saving: int = DEFAULT_MIN_SAVING
    compile: str = "auto"
    overlap: bool | None = None
    speculative: SpeculativeConfig | None = None
    seed: int = 0
    debug_checks: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise invalid("device", self.device, 'must be "auto", "cpu", "cuda" or "cuda:<index>"')
        require_choice("dtype", self.dtype, (None, *DTYPES))
        require_choice("state_dtype", self.state_dtype, STATE_DTYPES)
        require_choice("kv_dtype", self.kv_dtype, (None, *DTYPES))
        require_choice("eviction", self.eviction, EVICTION_POLICIES)
        require_choice("compile", self.compile, COMPILE_MODES)
        for name in ("max_num_seqs", "max_num_batched_tokens", "min_saving"):
            require_int(name, getattr(self, name), minimum=1)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=1)
        for name in ("seed", "host_cache_bytes"):
            require_int(name, getattr(self, name), minimum=0, maximum=INT64_MAX)
        for name in ("enable_prefix_cache", "debug_checks"):
            require_bool(name, getattr(self, name))
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise invalid("overlap", self.overlap, "must be True, False or None")
        if self.speculative is not None and not isinstance(self.speculative, SpeculativeConfig):
            raise invalid("speculative", self.speculative, "must be a SpeculativeConfig or None")
        if self.overlap and self.speculative is not None:
            raise ValueError(
                "overlap=True does not go with speculative: the next step depends on what a verify accepts"
            )
        self._check_host_cache()
        normalize_integers(self)

    def _check_host_cache(self) -> None:
        if isinstance(self.host_cache_path, os.PathLike):
            object.__setattr__(self, "host_cache_path", os.fspath(self.host_cache_path))
        if self.host_cache_path is not None:
            path = self.host_cache_path
            if not isinstance(path, str) or not path or "\0" in path:
                raise invalid("host_cache_path", self.host_cache_path, "must be a path or None")
            if not self.host_cache_bytes:
                raise ValueError(f"host_cache_path={self.host_cache_path!r} needs host_cache_bytes, which is 0")
        if self.host_cache_bytes and not self.enable_prefix_cache:
            raise ValueError(f"host_cache_bytes={self.host_cache_bytes} needs enable_prefix_cache=True")

    @classmethod
    def with_overrides(cls, config: RuntimeConfig | None, overrides: Mapping[str, Any]) -> RuntimeConfig:
        """`config` (None: the defaults) with some fields replaced. Raises ValueError for a name that is no field."""
        base = cls() if config is None else config
        if not isinstance(base, RuntimeConfig):
            raise invalid("config", config, "must be a RuntimeConfig or None")
        require_known(overrides, [field.name for field in dataclasses.fields(cls)], "RuntimeConfig")
        return dataclasses.replace(base, **overrides) if overrides else base

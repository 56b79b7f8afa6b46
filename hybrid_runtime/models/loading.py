"""From what a user names as a model to a `HybridModel`."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.models.adapters import adapt, supported_architectures
from hybrid_runtime.models.hybrid_model import HybridModel

TINY_CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "tiny"
"""The checkpoint that comes with the package."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what text generation needs to know of it."""

    hybrid_model: HybridModel
    tokenizer: Any | None  # a transformers tokenizer; None for a model in memory
    eos_token_ids: tuple[int, ...]
    name: str


def load_model(
    source: PreTrainedModel | str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LoadedModel:
    """Loads a transformers model in memory, a checkpoint folder, a hub id, or "tiny" (the bundled checkpoint).

    A model in memory is shared, not copied, if it has the wanted dtype and device already; otherwise a converted copy
    is made and the caller's model stays as it is. `dtype=None` keeps the model's or the checkpoint's dtype;
    `device=None` keeps the model's device, and loads checkpoints to the CPU.

    Raises FileNotFoundError if the folder is missing, UnsupportedModelError for an architecture, or an option of its
    config, that has no adapter.
    """
    if isinstance(source, PreTrainedModel):
        return _loaded(_converted(source, dtype, device), None, source.config.name_or_path or source.config.model_type)
    name = str(source)
    path = str(_tiny_checkpoint()) if name == "tiny" else name
    if isinstance(source, os.PathLike) and not Path(path).is_dir():
        raise FileNotFoundError(f"no checkpoint folder {path}")
    _require_adapter(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
    if dtype == torch.float64:
        model.double()  # transformers makes buffers (rotary frequencies) in float32 whatever the dtype
    return _loaded(_converted(model, dtype, device), _tokenizer(path), name)


def _loaded(model: PreTrainedModel, tokenizer: Any | None, name: str) -> LoadedModel:
    hybrid_model = adapt(model.eval())
    return LoadedModel(hybrid_model, tokenizer, hybrid_model.spec.eos_token_ids, name)


def _tokenizer(path: str) -> Any | None:
    """The checkpoint's tokenizer; None for a folder that has none and serves token ids only."""
    is_folder = Path(path).is_dir()
    if is_folder and not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path)


def _tiny_checkpoint() -> Path:
    if not (TINY_CHECKPOINT / "config.json").is_file():
        raise FileNotFoundError(f"the bundled checkpoint is missing: there is no config.json in {TINY_CHECKPOINT}")
    return TINY_CHECKPOINT


def _require_adapter(path: str) -> None:
    """Refuses an architecture before its weights are read."""
    architectures = AutoConfig.from_pretrained(path).architectures or ()
    if architectures and not set(architectures) & set(supported_architectures()):
        raise UnsupportedModelError(
            f"no adapter for the architecture {', '.join(architectures)}; "
            f"supported: {', '.join(supported_architectures())}"
        )


def _converted(model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str | None) -> PreTrainedModel:
    """`model` itself if nothing is to be changed, else a converted copy.

    Parameters that transformers keeps in float32 whatever the model's dtype, and buffers (rotary frequencies, router
    biases), are never narrowed.
    """
    dtype = dtype or model.dtype
    device = torch.device(device) if device is not None else model.device
    is_there = device.type == model.device.type and device.index in (None, model.device.index)
    if is_there and dtype == model.dtype:
        return model
    model = copy.deepcopy(model)
    nn.Module.to(model, device)
    if dtype == torch.float64:
        return model.double()
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in keep):
            parameter.data = parameter.data.to(dtype)
    return model

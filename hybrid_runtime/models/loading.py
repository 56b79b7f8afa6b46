"""From what a user names as a model to a `HybridModel`."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybrid_runtime.config import DTYPES
from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.field_checks import invalid
from hybrid_runtime.models.adapters import adapt, supported_architectures
from hybrid_runtime.models.hybrid_model import HybridModel

_LOGGER = logging.getLogger(__name__)

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
    folder: Path | None = None  # of a checkpoint folder


def load_model(
    source: PreTrainedModel | str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    needs_tokenizer: bool = True,
) -> LoadedModel:
    """Loads a transformers model in memory, a checkpoint folder, a hub id, or "tiny" (always the bundled
    checkpoint).

    A model in memory is shared, not copied, if it has the wanted dtype and device already; otherwise a converted copy
    is made and the caller's model stays as it is. `dtype=None` keeps the model's or the checkpoint's dtype;
    `device=None` keeps the model's device, and loads checkpoints to the CPU. The tokenizer of a checkpoint is None if
    it is not needed, or if there is none that can be loaded (the reason is logged).

    Raises FileNotFoundError if there is no such folder and no such hub id, UnsupportedModelError for an architecture,
    or an option of its config, that has no adapter, ValueError for a source of another kind and for weights that are
    missing from a checkpoint or whose dtype is not one of `DTYPES`.
    """
    if isinstance(source, PreTrainedModel):
        return _loaded(_converted(source, dtype, device), None, source.config.name_or_path or source.config.model_type)
    if not isinstance(source, str | os.PathLike):
        raise invalid("model", source, "must be a transformers model, a checkpoint folder, a hub id or 'tiny'")
    name = str(source)
    path = str(_tiny_checkpoint()) if name == "tiny" else os.path.expanduser(name)
    if not Path(path).is_dir() and (isinstance(source, os.PathLike) or _is_path(name)):
        raise FileNotFoundError(f"there is no checkpoint folder {path}")
    _require_adapter(path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", output_loading_info=True)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"{len(missing)} weights are missing from the checkpoint {path}: {', '.join(missing[:8])}")
    tokenizer = _load_tokenizer(path) if needs_tokenizer else None
    folder = Path(path) if Path(path).is_dir() else None
    return _loaded(_converted(model, dtype, device), tokenizer, name, folder)


def _loaded(model: PreTrainedModel, tokenizer: Any | None, name: str, folder: Path | None = None) -> LoadedModel:
    hybrid_model = adapt(model)
    return LoadedModel(hybrid_model, tokenizer, hybrid_model.spec.eos_token_ids, name, folder)


def _load_tokenizer(path: str) -> Any | None:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        _LOGGER.warning("no tokenizer can be loaded from %s: %s", path, error)
        return None


def _tiny_checkpoint() -> Path:
    if not (TINY_CHECKPOINT / "config.json").is_file():
        raise FileNotFoundError(f"the bundled checkpoint is missing: there is no config.json in {TINY_CHECKPOINT}")
    return TINY_CHECKPOINT


def _is_path(name: str) -> bool:
    """Whether a name can only be a folder: hub ids are `name` or `owner/name`."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def _require_adapter(path: str) -> None:
    """Refuses an architecture before its weights are read."""
    try:
        architectures = AutoConfig.from_pretrained(path).architectures or ()
    except OSError as error:
        raise FileNotFoundError(
            f"{path} is no checkpoint folder here and could not be loaded from a hub: {error}"
        ) from error
    if architectures and not set(architectures) & set(supported_architectures()):
        raise UnsupportedModelError(
            f"no adapter for the architecture {', '.join(architectures)}; "
            f"supported: {', '.join(supported_architectures())}"
        )


def _converted(model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str | None) -> PreTrainedModel:
    """`model` itself if nothing is to be changed, else a converted copy.

    Parameters that transformers keeps in float32 whatever the model's dtype, and buffers (rotary frequencies, router
    biases), are never narrowed; in a float64 model all of them are widened.
    """
    dtype = dtype or model.dtype
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise ValueError(f"the model's dtype must be one of {', '.join(DTYPES)}, not {dtype}: pass dtype=")
    device = torch.device(device) if device is not None else model.device
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())

    def target(name: str) -> torch.dtype:
        is_kept = dtype != torch.float64 and any(part in name for part in keep)
        return torch.float32 if is_kept else dtype

    is_converted = all(
        tensor.dtype == target(name) for name, tensor in model.named_parameters() if tensor.is_floating_point()
    ) and (dtype != torch.float64 or all(t.dtype == dtype for t in model.buffers() if t.is_floating_point()))
    if is_converted and device == model.device:
        return model
    model = copy.deepcopy(model)
    model.to(device)  # type: ignore[arg-type]  # wrongly typed in transformers
    if dtype == torch.float64:
        return model.double()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(target(name))
    return model

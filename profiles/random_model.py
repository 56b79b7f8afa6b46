"""Models of a given shape with random weights: what is measured does not depend on what they say."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

GRANITE = Path(__file__).parent / "models" / "granite-h-350m"


def random_model(config_folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model that a folder's `config.json` describes; the same weights on every call."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(config_folder)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()

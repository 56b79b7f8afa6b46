"""Writing the checkpoint folder: an ordinary transformers folder, replaced file by file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, KimiLinearForCausalLM, PreTrainedTokenizerFast

from hybrid_runtime.training.tokenizer import END_OF_TEXT_ID, PAD_ID


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """Matrices are stored in bfloat16; norms, convolutions and decay parameters, small and sensitive, in float32."""
    return torch.bfloat16 if tensor.ndim == 2 else torch.float32


def save_folder(model: KimiLinearForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, weights, tokenizer and generation config to `folder`; its other files stay as they are.

    Each file is written elsewhere on the same file system and moved into place, so that a reader, or an interrupted
    run, sees whole files only. The config asks for float32: stored bfloat16 matrices are widened when loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(stored_dtype(value)).contiguous() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch_name:
        scratch = Path(scratch_name)
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(scratch)
        generation = GenerationConfig(
            bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=PAD_ID, do_sample=False
        )
        generation.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in scratch.iterdir():
            os.replace(file, folder / file.name)

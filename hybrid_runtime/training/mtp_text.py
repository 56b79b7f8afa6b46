"""What speculation sees: prompts cut from files, and the target's own greedy continuations of them.

Shapes: P prompts, L tokens of a prompt, C tokens of a continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.runtime import HybridRuntime
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.training.tokenizer import END_OF_TEXT_ID

NUM_RUNNING = 32


def cut_prompts(files: Sequence[np.ndarray], num_prompts: int, length: int, seed: int) -> Tensor:
    """`[P, L]` int64: pieces from anywhere in the files, laid one behind another, each behind an end-of-text token.

    Raises ValueError if the files have too few tokens for one piece.
    """
    separator = np.asarray([END_OF_TEXT_ID], dtype=np.uint16)
    stream = np.concatenate([part for file in files for part in (separator, file)])
    if len(stream) < length:
        raise ValueError(f"{len(stream)} tokens make no prompt of {length}")
    starts = np.random.default_rng(seed).integers(0, len(stream) - length + 1, num_prompts)
    return torch.from_numpy(np.stack([stream[start : start + length] for start in starts]).astype(np.int64))


def continue_greedily(folder: Path, prompts_PL: Tensor, num_tokens: int, *, compiled: bool) -> Tensor:
    """`[P, L + C]` int64: the prompts, then the `num_tokens` tokens that the checkpoint finds most likely, one by one.

    An end-of-text token does not end a continuation: as in training, another file follows.
    """
    length = prompts_PL.shape[1] + num_tokens
    with HybridRuntime(
        folder,
        dtype="float32",
        max_num_seqs=NUM_RUNNING,
        max_model_len=length,
        num_kv_slots=NUM_RUNNING * length,
        num_state_slots=NUM_RUNNING,
        enable_prefix_cache=False,
        compile="auto" if compiled else "off",
    ) as runtime:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        outputs = runtime.generate(prompts_PL.tolist(), params)
    continued = torch.tensor([output.outputs[0].token_ids for output in outputs])
    return torch.cat([prompts_PL, continued], dim=1)

"""The truth that parity is measured against: transformers itself, run in float64.

Its modeling code casts to float32 in places, whatever the model's dtype. `in_float64` makes these casts widen instead,
for one modeling module at a time, and changes nothing else.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel


class _WideTorch(ModuleType):
    """`torch`, but its float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A float64 copy of `model` whose code, inside the block, makes no float32 tensor."""
    modeling = sys.modules[type(model).__module__]
    wide = copy.deepcopy(model).double()
    with mock.patch.object(modeling, "torch", _WideTorch("torch")), mock.patch.object(Tensor, "float", Tensor.double):
        yield wide


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits `[len(tokens), V]` of one sequence, without a cache."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


@torch.no_grad()
def generate(model: PreTrainedModel, tokens: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation of one sequence; end-of-text tokens do not end it."""
    ids = torch.tensor([list(tokens)])
    run_generate: Any = model.generate  # a mixin's method, which the type of the module hides
    output = run_generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(tokens) :].tolist()

"""A pytest plugin that makes the tensors of tests on the device that HYBRID_RUNTIME_TEST_DEVICE names.

For tests that are written for the CPU: what they make without naming a device is drawn on the CPU, by their own
generators, and then moved; so the numbers are the same everywhere. To run one file by hand on a GPU:

    HYBRID_RUNTIME_TEST_DEVICE=cuda python -m pytest -p tests.gpu.on_device FILE
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

VARIABLE = "HYBRID_RUNTIME_TEST_DEVICE"


class OnDevice(TorchFunctionMode):
    """Moves every tensor that is made without a device to one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _device_constructors() and kwargs.get("device") is None and isinstance(made, torch.Tensor):
            return made.to(self.device)
        return made


def pytest_configure() -> None:
    OnDevice(torch.device(os.environ[VARIABLE])).__enter__()

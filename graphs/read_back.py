"""Results on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class ReadBack:
    """Copies of tensors for the host, made in the order of the device's stream: what overwrites them comes later."""

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host: list[Tensor] = []
        for tensor in tensors:
            if tensor.device.type == "cuda":
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                self._host.append(host)
            else:
                self._host.append(tensor)
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host. Blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

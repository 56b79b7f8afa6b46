"""Arrays of indices at fixed places of a device's memory, which the host fills by one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_ALIGNMENT = 8  # int64 elements: 64 bytes, at a multiple of which every array starts
_NUM_STAGING = 3  # what was staged is not written again before the two loads after it
Shapes = Mapping[str, tuple[int, ...]]


class StaticArrays:
    """Named int64 arrays in one tensor. Which names and shapes there are, each step says; equal shapes lie at equal
    places, which is what a captured step reads.

    At most two loads may be under way when the next is made: the caller has waited for what came of the one before.
    """

    def __init__(self, largest: Shapes, device: torch.device) -> None:
        """There will be room for `largest`, and so for shapes with the same names of which none is larger."""
        _, size = _places(largest)
        with torch.inference_mode(False):  # writable in either mode, as the pools
            self._device_array = torch.zeros(size, dtype=torch.int64, device=device)
            on_cuda = device.type == "cuda"
            self._staging = [torch.zeros(size, dtype=torch.int64, pin_memory=on_cuda) for _ in range(_NUM_STAGING)]
        self._turn = 0

    def load(self, arrays: Mapping[str, NDArray[np.int64]], shapes: Shapes, padding: Mapping[str, ArrayLike]) -> None:
        """Copies `arrays` to the device, each of at most its shape in `shapes`.

        What a shape has beyond its array is filled with `padding`, by name, or with 0.
        """
        places, size = _places(shapes)
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % _NUM_STAGING
        host = staging.numpy()
        for name, place in places.items():
            array, shape = arrays[name], shapes[name]
            whole = host[place : place + math.prod(shape)].reshape(shape)
            if array.shape != shape:
                whole[...] = padding.get(name, 0)
            whole[tuple(map(slice, array.shape))] = array
        self._device_array[:size].copy_(staging[:size], non_blocking=True)

    def views(self, shapes: Shapes) -> dict[str, Tensor]:
        """The arrays on the device, for a step with these shapes."""
        places, _ = _places(shapes)
        return {
            name: self._device_array[place : place + math.prod(shapes[name])].view(shapes[name])
            for name, place in places.items()
        }


def _places(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Where each array starts, and the size of all."""
    places, end = {}, 0
    for name, shape in shapes.items():
        places[name] = end
        end += aligned(math.prod(shape))
    return places, end


def aligned(size: int) -> int:
    """As many int64 elements, or a few more, so that what follows them starts at a multiple of 64 bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT

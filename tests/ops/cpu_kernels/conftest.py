"""The kernels are built once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hybrid_runtime.ops import cpu_kernels


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    cpu_kernels.ensure_built()


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

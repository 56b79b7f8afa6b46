"""Named ranges of the engine's phases, which show in Nsight Systems (NVTX) and in traces of PyTorch's profiler.

For code outside of compiled graphs: inside, a range would break the graph.
"""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any

import nvtx
from torch.autograd import profiler

DOMAIN = "hybrid_runtime"  # of the NVTX ranges
_domain: Any = nvtx.get_domain(DOMAIN)  # of no effect unless the process was started by a tool that listens


class Range:
    """A phase that runs while the context is open. Costs less than half a microsecond while nobody listens."""

    __slots__ = ("_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record: Any = None

    def __enter__(self) -> None:
        _domain.push_range(_attributes(self._name))
        if profiler._is_profiler_enabled:
            self._record = profiler.record_function(self._name)
            self._record.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record is not None:
            self._record.__exit__(kind, error, trace)
        _domain.pop_range()


@cache
def _attributes(name: str) -> Any:
    return _domain.get_event_attributes(message=name)

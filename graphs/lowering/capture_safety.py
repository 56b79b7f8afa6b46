"""Whether a step can be captured as a CUDA graph, as far as that shows without one.

Two passes look at the step itself, each with its own blind spots: one reads every operation on fake CUDA tensors, the
other runs a small instance on different data and compares what happened. What Inductor made of it is the third look, in
`findings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_runtime.graphs.lowering.step import Step, Trial

aten = torch.ops.aten

_HOST_SYNCS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.allclose.default,
}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}


def unsafe_operations(step: Step) -> list[str]:
    """What the step's operations, run on its fake arguments, would do that a capture forbids."""
    mode = next((tensor.fake_mode for tensor in step.tensors if isinstance(tensor, FakeTensor)), FakeTensorMode())
    watch = _OperationWatch()
    try:
        with mode, watch, torch.no_grad():
            outputs = step.function(*step.arguments)
    except Exception as error:  # a step that cannot even be traced is told as such, whatever stopped it
        return [*watch.complaints, f"stops with {type(error).__name__}: {str(error).splitlines()[0][:160]}"]
    for output in tree_leaves(outputs):
        if not isinstance(output, Tensor):
            watch.complaints.append(f"returns a {type(output).__name__}, which a replay would not renew")
        elif output.device.type != "cuda":
            watch.complaints.append(f"returns a tensor on {output.device}")
    return watch.complaints


class _OperationWatch(TorchDispatchMode):
    """Reads every operation on its way to the fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.complaints: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for complaint in (_data_dependence(func, args), _device_mix(func, args, kwargs)):
            if complaint is not None:
                self.complaints.append(f"{func}: {complaint}")
        return func(*args, **kwargs)


def _data_dependence(func: Any, args: Any) -> str | None:
    """Why an operation would ask the device for values, or draw random numbers, on replay."""
    tags = getattr(func, "tags", ())
    if func in _HOST_SYNCS or torch.Tag.data_dependent_output in tags:
        return "waits for values of the device"
    if func in _INDEXING:
        is_masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return "indexes by a boolean mask, whose count it must wait for" if is_masked else None
    if torch.Tag.dynamic_output_shape in tags:
        return "has a result whose shape depends on values"
    if torch.Tag.nondeterministic_seeded in tags:
        return "draws from a generator that a graph does not advance"
    return None


def _device_mix(func: Any, args: Any, kwargs: Any) -> str | None:
    """Why an operation would touch host memory."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    wanted = kwargs.get("device")
    made_on = {torch.device(wanted).type} if wanted is not None else set()
    if func in _COPIES and len(devices | made_on) > 1:
        return "copies between host and device"
    if func is aten.lift_fresh.default:
        return "lifts a constant from the host"
    if devices == {"cpu"} or (not tensors and made_on == {"cpu"}):
        return None if func is aten.detach.default else "works on a CPU tensor"
    return "mixes CPU and CUDA tensors" if "cpu" in devices else None


def differences_between_runs(trial: Trial) -> list[str]:
    """What changes between runs on different data, so that a replay of the first would be wrong for the second.

    Compares operations with their shapes and Python numbers, addresses of the static tensors, and results' shapes.
    """
    found: list[str] = []
    addresses = _layouts(trial.static)
    first: tuple[list[_Operation], list[Any]] | None = None
    for fill in trial.fills:
        fill()
        trace = _Trace()
        with trace, torch.no_grad():
            outputs = trial.function()
        if _layouts(trial.static) != addresses:
            found.append("a static tensor was resized or given another memory")
        run = trace.operations, [layout[1:] for layout in _layouts(tree_leaves(outputs))]
        if first is None:
            first = run
            continue
        found += _compare(first[0], run[0])
        if first[1] != run[1]:
            found.append(f"results have other shapes: {first[1]}, then {run[1]}")
    return list(dict.fromkeys(found))


_Operation = tuple[str, tuple[Any, ...]]


class _Trace(TorchDispatchMode):
    """Writes down each operation with the shapes of its tensors and the values of all else."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations.append((str(func), tuple(_described(leaf) for leaf in tree_leaves((args, kwargs)))))
        return func(*args, **kwargs)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), str(leaf.dtype)
    return repr(leaf)


def _layouts(tensors: Sequence[Any]) -> list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return [(t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors if isinstance(t, Tensor)]


def _compare(first: list[_Operation], second: list[_Operation]) -> list[str]:
    for before, after in zip(first, second, strict=False):
        if before != after:
            return [f"{before[0]} {before[1]} became {after[0]} {after[1]}"]
    if len(first) != len(second):
        return [f"{len(first)} operations became {len(second)}"]
    return []

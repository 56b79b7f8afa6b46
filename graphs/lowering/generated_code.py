"""Reads the Python module that Inductor generates: kernels, launches, calls of libraries, allocations, host work.

Counts are per call of the module: what stands in a region's function counts as often as the region is called.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

_EXTERN_ROOTS = ("extern_kernels.", "torch.ops.", "aten.", "inductor_ops.")
_NOT_LAUNCHED = ("torch.ops.inductor._reinterpret_tensor", "torch.ops.inductor._alloc_from_pool")
_HOST_METHODS = ("item", "cpu", "tolist", "numpy", "_local_scalar_dense")
_REDUCTIONS = ("sum", "amin", "amax")


@dataclass(frozen=True)
class KernelSource:
    """`function` names the kernel in `source`, which is a module of its own."""

    function: str
    source: str


@dataclass(frozen=True)
class Allocation:
    """A buffer that the module allocates, `times` times per call. `shape` leaves out sizes known at run time only."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    times: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class GeneratedModule:
    """`kernels` by the name under which the module launches them; `copied_if_misaligned` are names of inputs."""

    kernels: Mapping[str, KernelSource]
    launches: Counter[str]
    extern_calls: Counter[str]
    allocations: tuple[Allocation, ...]
    copied_if_misaligned: tuple[str, ...]
    host_work: tuple[str, ...]


def parse_module(code: str, sizes: Mapping[str, int] | None = None) -> GeneratedModule:
    """What the text of a generated module does when its `call` is called, with these values of its dynamic sizes."""
    tree = ast.parse(code)
    kernels = {name: source for name, source in map(_kernel_source, tree.body) if source is not None}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    times = _times_called(functions)
    reader = _Reader(kernels, sizes or {})
    for name, count in times.items():
        reader.read(functions[name], count)
    return GeneratedModule(
        kernels,
        reader.launches,
        reader.extern_calls,
        tuple(reader.allocations),
        tuple(reader.copied_if_misaligned),
        tuple(reader.host_work),
    )


def _kernel_source(node: ast.stmt) -> tuple[str, KernelSource | None]:
    """The kernel that a statement `name = async_compile.triton(function, source, ...)` defines."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
        call = node.value
        if ast.unparse(call.func) == "async_compile.triton":
            function, source = (ast.literal_eval(argument) for argument in call.args[:2])
            return node.targets[0].id, KernelSource(function, source)
    return "", None


def _times_called(functions: Mapping[str, ast.FunctionDef]) -> dict[str, int]:
    """How often each function runs in one run of `call`."""
    times: Counter[str] = Counter()

    def visit(name: str) -> None:
        times[name] += 1
        for call in _calls(functions[name]):
            called = ast.unparse(call.func)
            if called in functions and called != name:
                visit(called)

    visit("call")
    return dict(times)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


class _Reader:
    """Collects what the calls in function bodies do."""

    def __init__(self, kernels: Mapping[str, KernelSource], sizes: Mapping[str, int]) -> None:
        self._kernels = kernels
        self._sizes = sizes
        self.launches: Counter[str] = Counter()
        self.extern_calls: Counter[str] = Counter()
        self.allocations: list[Allocation] = []
        self.copied_if_misaligned: list[str] = []
        self.host_work: list[str] = []

    def read(self, function: ast.FunctionDef, times: int) -> None:
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign | ast.Expr | ast.Return):
                self._read_statement(statement, times)

    def _read_statement(self, statement: ast.Assign | ast.Expr | ast.Return, times: int) -> None:
        for call in _calls(statement):
            called = ast.unparse(call.func)
            root, _, method = called.rpartition(".")
            if method == "run" and root in self._kernels:
                self.launches[root] += times
            elif called.startswith(_EXTERN_ROOTS) and called not in _NOT_LAUNCHED:
                self.extern_calls[called] += times
            elif method in _REDUCTIONS and root:
                self.extern_calls[f"Tensor.{method}"] += times  # the tail of a reduction that was split in two
            elif called.startswith("empty_strided"):
                self._read_allocation(statement, call, times)
            elif called == "copy_if_misaligned":
                self.copied_if_misaligned.append(ast.unparse(call.args[0]))
            if method in _HOST_METHODS or _mentions_cpu(call):
                self.host_work.append(ast.unparse(statement))

    def _read_allocation(self, statement: ast.AST, call: ast.Call, times: int) -> None:
        name = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ast.unparse(statement)
        device = ast.unparse(call.func).removeprefix("empty_strided_")
        sizes = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else []
        known = tuple(size for size in map(self._value, sizes) if size is not None)
        dtype = getattr(torch, ast.unparse(call.args[2]).removeprefix("torch."))
        self.allocations.append(Allocation(name, known, dtype, device, times))
        if len(known) < len(sizes):
            self.host_work.append(f"{ast.unparse(statement)}  # a size that is known at run time only")
        if device != "cuda":
            self.host_work.append(ast.unparse(statement))

    def _value(self, size: ast.expr) -> int | None:
        """A size in numbers; None for one that is known at run time only."""
        try:
            return int(eval(ast.unparse(size), {"__builtins__": {}, "max": max, "min": min}, dict(self._sizes)))
        except NameError:
            return None


def _mentions_cpu(call: ast.Call) -> bool:
    """Whether an argument names the CPU as a device."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(ast.unparse(argument) in ("'cpu'", "device(type='cpu')") for argument in arguments)

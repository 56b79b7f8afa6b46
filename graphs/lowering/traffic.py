"""Bytes that each launch reads and writes, from Inductor's own list of what a kernel depends on.

An indirect access (a gather or scatter by index) counts as many elements as there are values of the loop variables that
its index depends on, at most the whole buffer: an element that two indices name counts twice. A hand-written kernel is
opaque: it counts whole tensors, but for a pool the rows that the step says it touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._inductor.dependencies import MemoryDep, StarDep, WeakDep
from torch._inductor.ir import MultiOutput, MultiOutputLayout, NoneLayout
from torch._inductor.loop_body import LoopBody, MemoryUsageType
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V

from hybrid_runtime.graphs.lowering.step import Step


@dataclass(frozen=True)
class Traffic:
    """Of one launch: bytes by buffer. `kernel` is its name in the generated code, or that of an extern call."""

    kernel: str
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    is_opaque: bool = False

    @property
    def num_read(self) -> int:
        return sum(self.reads.values())

    @property
    def num_written(self) -> int:
        return sum(self.writes.values())


def generated_traffic(kernel: str, nodes: Iterable[Any]) -> Traffic:
    """Of a kernel that Inductor generates from these scheduler nodes. Call it while the nodes are being lowered."""
    nodes = [each for node in nodes for each in node.get_nodes()]
    own = {name for node in nodes for name in node.get_buffer_names()}
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for node in nodes:
        for dep in node.read_writes.reads:
            # A StarDep here is only the order of an in-place scatter behind what it overwrites.
            if not isinstance(dep, WeakDep | StarDep) and dep.name not in own:
                _raise_to(reads, _real_name(dep.name), _accessed_bytes(dep, node._body))
        for dep in node.read_writes.writes:
            target = _real_name(dep.name)
            if not isinstance(dep, WeakDep) and (target != dep.name or _is_used_outside(dep.name, nodes)):
                _raise_to(writes, target, _accessed_bytes(dep, node._body))
    return Traffic(kernel, reads, writes)


def extern_traffic(node: Any, step: Step) -> Traffic | None:
    """Of a call that Inductor does not generate; None for a node that launches nothing."""
    kernel = _extern_name(node.node)
    if kernel is None:
        return None
    is_opaque = type(node.node).__name__ == "UserDefinedTritonKernel"
    names = [_real_name(dep.name) for dep in node.read_writes.reads if not isinstance(dep, WeakDep)]
    reads = {name: _whole_bytes(name, step) for name in names if not _is_unwritten(name)}
    targets = [target for name in node.get_buffer_names() for target in _targets(name)]
    writes = {target: _whole_bytes(target, step) for target in targets}
    return Traffic(kernel, reads, writes, is_opaque)


def _extern_name(ir_node: Any) -> str | None:
    kind = type(ir_node).__name__
    if kind in ("MultiOutput", "InvokeSubgraph", "MutationOutput"):
        return None
    if kind == "UserDefinedTritonKernel":
        return str(ir_node.get_kernel_and_metadata()[0].fn.__name__)
    return str(getattr(ir_node, "python_kernel_name", None) or kind)


def _targets(name: str) -> list[str]:
    """What an extern call writes for one of its buffers: the buffers it mutates, its several outputs, or itself."""
    buffer = V.graph.scheduler.name_to_buf[name]
    if buffer.get_mutations():
        return list(buffer.get_mutations())
    if isinstance(buffer.node.layout, NoneLayout):
        return []  # an operator without a result: what it mutates has buffers of its own
    if isinstance(buffer.node.layout, MultiOutputLayout):
        users = [getattr(user.node, "node", None) for user in buffer.users]
        return [str(user.get_name()) for user in users if isinstance(user, MultiOutput)]
    return [name]


def _real_name(name: str) -> str:
    """The buffer that holds the values: a mutation gives what it mutates a new name."""
    return str(V.graph.scheduler.mutation_real_name.get(name, name))


def _is_unwritten(name: str) -> bool:
    """Whether a buffer is only room for a kernel's result."""
    buffer = V.graph.scheduler.name_to_buf.get(name)
    return buffer is not None and isinstance(buffer.defining_op, NopKernelSchedulerNode)


def _is_used_outside(name: str, nodes: list[Any]) -> bool:
    """Whether a buffer leaves its kernel, so that it has to be stored."""
    buffer = V.graph.scheduler.name_to_buf.get(name)
    return buffer is None or any(user.node.get_name() == "OUTPUT" or user.node not in nodes for user in buffer.users)


def _accessed_bytes(dep: Any, body: LoopBody) -> int:
    """Bytes that one node of a kernel, with this loop body, reads or writes of a buffer."""
    name = _real_name(dep.name)
    whole = _numel(name)
    if not isinstance(dep, MemoryDep):
        return whole * _itemsize(name)
    accessed = _gathered(name, body) if dep.is_indirect() else _size(dep.get_numel())
    return min(accessed, whole) * _itemsize(name)


def _gathered(name: str, body: LoopBody) -> int:
    """Elements that an indirect access touches: one for each value of the loop variables that its index depends on.

    Through a loaded index it depends on whatever the loads of integers depend on.
    """
    uses = body.memory_usage
    entries = [*uses[MemoryUsageType.LOAD], *uses[MemoryUsageType.STORE], *uses[MemoryUsageType.STORE_REDUCTION]]
    own = [entry for entry in entries if entry.buffer_name and _real_name(entry.buffer_name) == name]
    assert own, f"{name} is not among the buffers of its loop"
    integers = [entry for entry in uses[MemoryUsageType.LOAD] if _is_integer(entry.buffer_name)]
    indices = [body.indexing_exprs[entry.index_name] for entry in (*own, *integers)]
    used = {symbol for index in indices for symbol in index.free_symbols}
    return math.prod(_size(size) for variable, size in body.var_ranges.items() if variable in used)


def _whole_bytes(name: str, step: Step) -> int:
    pool = step.pool_like(*_shape_and_dtype(name))
    return pool.bytes_touched if pool is not None else _numel(name) * _itemsize(name)


def _shape_and_dtype(name: str) -> tuple[tuple[int, ...], Any]:
    buffer = V.graph.try_get_buffer(name)
    if buffer is None:
        buffer = V.graph.graph_inputs[name]
    return tuple(_size(size) for size in buffer.get_size()), buffer.get_dtype()


def sizes_by_symbol(graph: Any) -> dict[Any, int]:
    """What the symbols of dynamic sizes are in the example that the graph was lowered for."""
    shape_env = graph.sizevars.shape_env
    values = getattr(shape_env, "backed_var_to_val", None)  # its name from torch 2.12 on
    return {symbol: int(value) for symbol, value in (shape_env.var_to_val if values is None else values).items()}


def _size(expression: Any) -> int:
    """A number of elements, of dynamic sizes that of the example; what is known only at run time counts as none."""
    value = expression if isinstance(expression, int) else expression.xreplace(sizes_by_symbol(V.graph))
    return int(value) if isinstance(value, int) or value.is_number else 0


def _numel(name: str) -> int:
    return _size(V.graph.get_numel(name))


def _is_integer(name: str | None) -> bool:
    return name is not None and not V.graph.get_dtype(_real_name(name)).is_floating_point


def _itemsize(name: str) -> int:
    return int(V.graph.get_dtype(name).itemsize)


def _raise_to(counts: dict[str, int], name: str, num_bytes: int) -> None:
    """Accesses of one buffer by fused nodes meet in the cache: the largest counts, not the sum."""
    counts[name] = max(counts.get(name, 0), num_bytes)

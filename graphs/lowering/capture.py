"""Runs torch.compile on a step of fake tensors up to the point where it would be executed, and keeps what it made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._inductor.virtualized import V

from hybrid_runtime.graphs.lowering.step import PoolArgument, Step
from hybrid_runtime.graphs.lowering.traffic import Traffic, extern_traffic, generated_traffic, sizes_by_symbol

_OPTIONS = {
    "compile_threads": 1,
    "fx_graph_cache": False,
    "assert_indirect_indexing": False,
    "shape_padding": False,  # would time matrix products on the device
    "triton.cudagraphs": False,
}


@dataclass(frozen=True)
class GraphInput:
    """An input of the generated module: its name there, and what it is to the step's caller.

    `argument`: its index in `Step.tensors`; None for a tensor that the function brought along. `pool`: the step's pool
    that it is, if any.
    """

    name: str
    argument: int | None
    pool: PoolArgument | None


@dataclass(frozen=True)
class LoweredStep:
    """What Inductor made of a step.

    `traffic`: by region of the generated code ("" for the main part), per launch. `sizes`: what the names of dynamic
    sizes in the code stand for in the example.
    """

    step: Step
    code: str
    sizes: dict[str, int]
    inputs: tuple[GraphInput, ...]
    mutated: tuple[str, ...]
    traffic: dict[str, tuple[Traffic, ...]]
    cpu_constants: tuple[str, ...]
    capture_obstacle: str | None
    devices: tuple[str, ...]


class LoweringError(RuntimeError):
    """A step could not be lowered; the message says why."""


def lower(step: Step) -> LoweredStep:
    """Lowers a step as one graph, under `pretend_cuda`.

    Raises LoweringError if Dynamo or Inductor refuse it.
    """
    torch._dynamo.reset()
    counters.clear()
    recorder = _Recorder(step)
    with (
        recorder.attached(),
        inductor_config.patch({**_OPTIONS, **step.options}),
        functorch_config.patch(enable_autograd_cache=False),
        torch.no_grad(),
    ):
        try:
            torch.compile(step.function, fullgraph=True, dynamic=False)(*step.arguments)
        except _Lowered as lowered:
            return recorder.result(lowered.arguments)
        except Exception as error:
            raise LoweringError(_first_line(error)) from error
    raise LoweringError("nothing was compiled: the function has no tensor operation")


class _Lowered(BaseException):
    """Ends the call of a compiled function where its first kernel would run. No handler of errors shall see it."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _Recorder:
    """Listens to Inductor while it lowers one step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._traffic: dict[str, list[Traffic]] = {}
        self._code = ""
        self._graph: Any = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        define_kernel, codegen = TritonScheduling.define_kernel, GraphLowering.codegen
        choose = AlgorithmSelectorCache.__call__
        recorder = self

        def recording_define_kernel(self: Any, source: str, node_schedule: Any, kernel: Any) -> Any:
            name = define_kernel(self, source, node_schedule, kernel)
            nodes = [node for node in node_schedule if isinstance(node, BaseSchedulerNode)]
            recorder._add(generated_traffic(name, nodes))
            return name

        def recording_codegen(self: Any) -> Any:
            result = codegen(self)
            for node in self.scheduler.nodes:
                traffic = extern_traffic(node, recorder._step) if node.is_extern() else None
                if traffic is not None:
                    recorder._add(traffic)
            return result

        def ending_compile_to_module(self: Any) -> Any:
            code, _ = self.codegen()
            recorder._code, recorder._graph = code.value, self
            return _NeverRun

        def choosing_without_timing(self: Any, *args: Any, **kwargs: Any) -> Any:
            with inductor_config.patch(deterministic=True):
                return choose(self, *args, **kwargs)

        with (
            mock.patch.object(TritonScheduling, "define_kernel", recording_define_kernel),
            mock.patch.object(GraphLowering, "codegen", recording_codegen),
            mock.patch.object(GraphLowering, "_compile_to_module", ending_compile_to_module),
            mock.patch.object(AlgorithmSelectorCache, "__call__", choosing_without_timing),
        ):
            yield

    def result(self, call_arguments: list[Any]) -> LoweredStep:
        graph = self._graph
        step = self._step
        inputs = []
        for name, value in zip(graph.graph_inputs, call_arguments, strict=True):
            if isinstance(value, Tensor):
                argument = next((index for index, tensor in enumerate(step.tensors) if tensor is value), None)
                pool = next((pool for pool in step.pools if pool.tensor is value), None)
                inputs.append(GraphInput(name, argument, pool))
        incompatible = get_first_incompatible_cudagraph_node(graph.module)
        obstacle = (
            graph.disable_cudagraphs_reason
            or (f"{incompatible.target} cannot be captured" if incompatible is not None else None)
            or check_multiple_devices_or_any_cpu_nodes(graph.device_node_mapping)
        )
        return LoweredStep(
            step=step,
            code=self._code,
            sizes={str(symbol): value for symbol, value in sizes_by_symbol(graph).items()},
            inputs=tuple(inputs),
            mutated=tuple(graph.mutated_inputs),
            traffic={region: tuple(launches) for region, launches in self._traffic.items()},
            cpu_constants=tuple(name for name, value in graph.constants.items() if value.device.type == "cpu"),
            capture_obstacle=obstacle,
            devices=tuple(sorted(map(str, graph.device_types))),
        )

    def _add(self, traffic: Traffic) -> None:
        """Files what is launched under the region that is being lowered."""
        region = V.graph.name if isinstance(V.graph, SubgraphLowering) else ""
        self._traffic.setdefault(region, []).append(traffic)


class _NeverRun:
    """Stands where the generated module would be; calling it hands over the arguments and ends the run."""

    __file__ = os.devnull

    @staticmethod
    def call(arguments: list[Any]) -> NoReturn:
        raise _Lowered(list(arguments))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"

"""A CPU build of torch that believes in one sm_90 device, as far as Dynamo, Inductor and Triton's compiler ask.

Nothing is ever launched: tensors are fake, kernels are compiled and looked at. `torch.cuda.is_available()` stays False,
so that fake tensors avoid the device and Inductor leaves out streams and random state.

What is replaced is process-wide and, though `pretend_cuda` puts all of it back, torch remembers some answers in caches
of its own: use a process for it that does nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CAPABILITY = (9, 0)
WARP_SIZE = 32


class UnsupportedVersionError(RuntimeError):
    """The installed torch or Triton lacks a private name that the report relies on."""


class DeviceProperties:
    """What Inductor asks of a device, as an H200 answers."""

    name = "NVIDIA H200 (pretended)"
    major, minor = CAPABILITY
    multi_processor_count = 132
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = WARP_SIZE
    total_memory = 141 << 30
    L2_cache_size = 50 << 20
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    clock_rate = 1980000
    memory_clock_rate = 3201000
    memory_bus_width = 6144
    gcnArchName = ""
    is_integrated = 0
    is_multi_gpu_board = 0


@contextlib.contextmanager
def pretend_cuda() -> Iterator[tuple[str, ...]]:
    """Within it, code can be compiled for an sm_90 device. Yields what was replaced, and puts it back at the end.

    Compile caches go to a temporary folder. Raises UnsupportedVersionError where torch or Triton lack what is replaced.
    """
    with contextlib.ExitStack() as stack:
        replacements = _Replacements(stack)
        _cache_folders(stack)
        _device_interface(replacements)
        _device_guard(stack, replacements)
        _constant_folding(replacements)
        _triton_driver(replacements)
        yield tuple(replacements.names)


class _Replacements:
    """Attributes set for a while, each of which must have been there."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.names: list[str] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        if not hasattr(owner, name):
            raise UnsupportedVersionError(f"torch {torch.__version__} has no {label}")
        self._stack.callback(setattr, owner, name, vars(owner).get(name, getattr(owner, name)))
        setattr(owner, name, value)
        self.names.append(label)


def _cache_folders(stack: contextlib.ExitStack) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowering-")))
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        before = os.environ.get(variable)
        os.environ[variable] = str(folder / name)
        if before is None:
            stack.callback(os.environ.pop, variable, None)
        else:
            stack.callback(os.environ.__setitem__, variable, before)


def _device_interface(replacements: _Replacements) -> None:
    """Dynamo's and Inductor's questions about the device."""
    from torch._dynamo import device_interface

    properties: Any = DeviceProperties()

    class PretendedWorker(device_interface.CudaInterface.Worker):
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    class PretendedCuda(device_interface.CudaInterface):
        Worker = PretendedWorker
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        set_device = staticmethod(lambda device: None)
        exchange_device = staticmethod(lambda device: 0)
        maybe_exchange_device = staticmethod(lambda device: 0)
        synchronize = staticmethod(lambda device=None: None)
        get_device_properties = staticmethod(lambda device=None: properties)
        get_compute_capability = staticmethod(lambda device=None: CAPABILITY[0] * 10 + CAPABILITY[1])
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        is_dtype_supported = staticmethod(lambda dtype, including_emulation=False: True)
        get_raw_stream = staticmethod(lambda device: 0)

    dict(device_interface.get_registered_device_interfaces())  # fills the table, which ours then goes on top of
    replacements.set(
        device_interface,
        "device_interfaces",
        {**device_interface.device_interfaces, "cuda": PretendedCuda, "cuda:0": PretendedCuda},
    )
    replacements.set(torch.cuda, "get_device_properties", lambda device=None: properties)


def _device_guard(stack: contextlib.ExitStack, replacements: _Replacements) -> None:
    """torch's Python bindings guard the device of a tensor; a CPU build has no guard for CUDA and would raise.

    The CPU's guard, which does nothing, is entered in the place of CUDA's.
    """
    if torch.version.cuda is not None:
        return  # a build with CUDA brings a guard that copes with an absent device
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        registry = (ctypes.c_void_p * 8).in_dll(library, symbol)
    except ValueError:
        raise UnsupportedVersionError(f"torch {torch.__version__} has no {symbol} in libc10") from None
    cpu, cuda = 0, 1
    if not registry[cuda]:
        registry[cuda] = registry[cpu]
        stack.callback(registry.__setitem__, cuda, None)
        replacements.names.append("c10.device_guard")


class _OnCpu(TorchDispatchMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            is_cuda = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_cuda else value

        return func(*tree_map(moved, args), **tree_map(moved, kwargs or {}))


def _constant_folding(replacements: _Replacements) -> None:
    """Inductor computes constants of the graph on the device itself."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    def on_cpu(method: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _OnCpu():
                return method(self, *args, **kwargs)

        return wrapped

    for name in ("_deduce_value", "_add_peephole_patterns"):
        replacements.set(UniformValueConstantFolder, name, on_cpu(getattr(UniformValueConstantFolder, name, None)))


def _triton_driver(replacements: _Replacements) -> None:
    """Triton's driver, which knows its target and never loads libcuda."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class PretendedDriver(CudaDriver):
        def __init__(self) -> None:
            pass

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], WARP_SIZE)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return CAPABILITY

        def set_current_device(self, device: int) -> None:
            pass

    pretended = PretendedDriver()
    replacements.set(CudaDriver, "is_active", staticmethod(lambda: True))
    replacements.set(driver, "_default", pretended)
    replacements.set(driver, "_active", pretended)

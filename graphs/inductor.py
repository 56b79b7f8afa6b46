"""How Inductor is run: without checks whose answer is known, and with its C++ compiled while tracing goes on."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

_LOGGER = logging.getLogger(__name__)
_PATCHING = threading.Lock()  # held while a method of Inductor's is replaced
_TRIVIAL_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { out[0] = 0; }
"""


def inductor_settings() -> AbstractContextManager[None]:
    """In this context, Inductor's options are those that steps are compiled with."""
    from torch._inductor import config

    settings: dict[str, Any] = {}
    if "aot_inductor.enable_line_tables" in config.get_config_copy():
        settings["aot_inductor.enable_line_tables"] = False  # line numbers for debuggers: a fifth of a file's time
    return config.patch(settings)


@functools.cache
def pick_instructions() -> None:
    """Lets Inductor choose the vector instructions of its C++ without trying them out, which takes 7 seconds.

    It would build programs to find out whether the compiler knows what this processor does. The kernels of
    `ops.cpu_kernels` need the same of the compiler. Its matrix instructions (AMX) are tried as always.
    """
    from torch._inductor import cpu_vec_isa

    with _PATCHING:
        check = getattr(cpu_vec_isa.VecISA, "check_build", None)
        if check is None:
            return

        def is_known(self: cpu_vec_isa.VecISA, code: str) -> bool:
            return check(self, code) if "_tile_" in code else True

        cpu_vec_isa.VecISA.check_build = is_known  # type: ignore[method-assign]
        try:
            cpu_vec_isa.pick_vec_isa()  # which remembers it
        finally:
            cpu_vec_isa.VecISA.check_build = check  # type: ignore[method-assign]


@contextmanager
def many_graphs() -> Iterator[None]:
    """Inside, many graphs for a CPU are compiled in the time that they need at least. One thread at a time."""
    with _PATCHING, sources_read_once(), late_waits():
        yield


@contextmanager
def sources_read_once() -> Iterator[None]:
    """Inside, torch reads and splits the source of a function once, not for every graph and every call in it.

    Not for several threads at once. It keeps the sources of all that a graph was made of: two seconds of tokenizing for
    a model of two kinds of layers.
    """
    from torch._dynamo.package import SourceInfo

    add_code: Callable[[SourceInfo, CodeType], None] | None = getattr(SourceInfo, "add_code", None)
    if add_code is None:
        yield
        return
    known: dict[CodeType, Any] = {}

    @functools.wraps(add_code)
    def add_known_code(self: SourceInfo, code: CodeType) -> None:
        if code not in known:
            alone = SourceInfo(inlined_sources=set())
            add_code(alone, code)
            known[code] = alone.inlined_sources
        self.inlined_sources |= known[code]

    SourceInfo.add_code = add_known_code  # type: ignore[method-assign]
    try:
        yield
    finally:
        SourceInfo.add_code = add_code  # type: ignore[method-assign,assignment]


@contextmanager
def late_waits() -> Iterator[None]:
    """Inside, graphs for a CPU are returned while their C++ is still being compiled; it is there when this is left.

    Inductor waits for the compiler at the end of every graph, so that tracing and compiling, which need a core each,
    take turns. Nothing that was compiled inside may be called there. It concerns the calling thread alone, but not for
    several threads at once.

    Raises what the compiler raised, when it is done with all of them. With a version of Inductor that waits elsewhere,
    it waits as always.
    """
    from torch._inductor.async_compile import AsyncCompile

    wait: Callable[[AsyncCompile, dict[str, Any]], None] | None = getattr(AsyncCompile, "_wait_futures", None)
    if wait is None:
        yield
        return
    modules: list[tuple[AsyncCompile, dict[str, Any]]] = []
    here = threading.get_ident()

    @functools.wraps(wait)
    def note(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            modules.append((self, scope))
        else:  # its user is going to call what was compiled
            wait(self, scope)

    AsyncCompile._wait_futures = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile._wait_futures = wait  # type: ignore[method-assign,assignment]
    errors = []
    for compiling, scope in modules:
        try:
            wait(compiling, scope)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def start_precompiling_headers() -> None:
    """Has the header that all of Inductor's C++ includes compiled in another thread: 5 seconds, once per machine.

    Whoever needs it before it is there waits for it.
    """
    _precompiling_headers()


@functools.cache
def _precompiling_headers() -> threading.Thread:
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # here: two threads must not import one module

    pick_instructions()

    def precompile() -> None:
        try:
            with inductor_settings():
                CppPythonBindingsCodeCache.load_pybinding(["float*"], _TRIVIAL_KERNEL)
        except Exception as error:  # then the first graph will say what is wrong
            _LOGGER.info("Inductor's headers are not compiled ahead: %s", error)

    # Settings of Inductor's that its user has changed belong to a context, and threads begin with an empty one.
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(precompile,), name="precompile-headers", daemon=True)
    thread.start()
    return thread

"""How Inductor is run: what is left out changes nothing but the time, and whatever was patched is as before."""

from __future__ import annotations

import contextvars
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.package import SourceInfo
from torch._dynamo.utils import counters
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX512, VecISA
from torch._inductor.exc import CppCompileError

from hybrid_runtime.graphs import inductor
from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.inductor import late_waits, many_graphs, pick_instructions, sources_read_once

# Notes what it was told to do once that is done. Where that is a graph's C++, it waits while there is a file "hold",
# for 30 seconds at most, and fails if there is a file "fail".
COMPILER = """#!/bin/sh
case "$*" in *main.cpp*)
  for _ in $(seq 600); do
    [ -e "{folder}/hold" ] || break
    sleep 0.05
  done
  if [ -e "{folder}/hold" ]; then echo held for too long >&2; exit 1; fi
  if [ -e "{folder}/fail" ]; then echo out of luck >&2; exit 1; fi
esac
{compiler} "$@" && echo "$*" >> "{folder}/log"
"""
PICK = """
from torch._inductor import cpu_vec_isa
{first}
isa = cpu_vec_isa.pick_vec_isa()
print(type(isa).__name__, isa.build_arch_flags(), isa.build_macro())
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the compiler of these tests looks for what it is to do. Their cache holds the header and nothing else."""
    folder = tmp_path_factory.mktemp("inductor")
    compiler = os.environ.get("CXX", "g++")
    script = folder / Path(compiler).name  # by which Inductor knows what its options are called
    script.write_text(COMPILER.format(folder=folder, compiler=compiler))
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        patch.setattr(codecache, "_HEADER_DIR", str(folder / "headers"))
        patch.setattr(codecache, "_HEADER_LOCK_DIR", str(folder / "locks"))
        with nobody_has_asked_for_headers(), config.patch({"cpp.cxx": (None, str(script)), "compile_threads": 2}):
            inductor._precompiling_headers().join()
            assert num_done(folder, "-x c++-header") == 1, "the header was compiled by another compiler"
            yield folder
    shutil.rmtree(folder / "headers")  # 150 MB


@contextmanager
def nobody_has_asked_for_headers() -> Iterator[None]:
    """Inside, it is as in a new process."""
    inductor._precompiling_headers.cache_clear()
    try:
        yield
    finally:
        inductor._precompiling_headers.cache_clear()


def num_done(folder: Path, what: str = "main.cpp") -> int:
    """How often the compiler has done something."""
    return sum(what in line for line in (folder / "log").read_text().splitlines())


def scaled(x: Tensor, scale: float) -> Tensor:
    return scale * x


def scaled_sum(x: Tensor, options: SimpleNamespace) -> Tensor:
    return (scaled(x, options.scale) + 1).sum(dim=-1)


def compiled(scale: float, code: str = "a") -> CompiledFunction:
    """A scale is compiled in, so each has C++ of its own."""
    x = torch.zeros(4, 3)
    mark_dynamic([x])
    return CompiledFunction(scaled_sum, x, SimpleNamespace(scale=scale), code=code)


def assert_right(function: CompiledFunction, scale: float) -> None:
    options = SimpleNamespace(scale=scale)
    for num_rows in (1, 2, 5):
        x = torch.randn(num_rows, 3)
        torch.testing.assert_close(function(x, options), scaled_sum(x, options))


def test_the_compiler_is_waited_for_when_the_context_is_left(folder: Path) -> None:
    scales, before = (1.1, 1.2), num_done(folder)
    (folder / "hold").touch()
    with late_waits():
        functions = [compiled(scale) for scale in scales]
        assert num_done(folder) == before
        (folder / "hold").unlink()
    assert num_done(folder) == before + len(scales)
    for function, scale in zip(functions, scales, strict=True):
        assert_right(function, scale)


def thread_here(function: Callable[..., None], *args: object) -> threading.Thread:
    """With the settings of Inductor's that these tests have changed, which belong to a context."""
    return threading.Thread(target=contextvars.copy_context().run, args=(function, *args))


def test_another_thread_waits_for_its_own_graphs(folder: Path) -> None:
    """Nobody would wait for them when the context is left: it may be over, or not, when they are called."""
    begun, done = threading.Event(), threading.Event()
    functions: list[CompiledFunction] = []

    def compile_here() -> None:
        begun.wait()
        functions.append(compiled(1.3))
        assert_right(functions[0], 1.3)
        done.set()

    thread = thread_here(compile_here)
    thread.start()
    with late_waits():
        begun.set()
        assert done.wait(60), "what it compiled could not be called"
    thread.join()


def test_many_threads_may_compile_many_graphs(folder: Path) -> None:
    """One after the other, whichever comes first: all are right, and nothing of Inductor's stays replaced."""
    wait, add_code = AsyncCompile._wait_futures, SourceInfo.add_code
    inside: list[int] = []
    worst: list[int] = []

    def compile_here(scale: float) -> None:
        with many_graphs():
            inside.append(1)
            worst.append(len(inside))
            function = compiled(scale)
            inside.pop()
        assert_right(function, scale)

    threads = [thread_here(compile_here, scale) for scale in (1.4, 1.5, 1.6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == [1, 1, 1]
    assert (AsyncCompile._wait_futures, SourceInfo.add_code) == (wait, add_code)


def test_what_the_compiler_says_comes_out_when_the_context_is_left(folder: Path) -> None:
    wait, is_compiled = AsyncCompile._wait_futures, False
    (folder / "fail").touch()
    try:
        with pytest.raises(CppCompileError, match="out of luck"), late_waits():  # noqa: PT012
            compiled(2.1)
            is_compiled = True
    finally:
        (folder / "fail").unlink()
    assert is_compiled
    assert AsyncCompile._wait_futures is wait
    assert_right(compiled(2.2), 2.2)


@pytest.mark.parametrize(("error", "scale"), [(ValueError, 3.1), (KeyboardInterrupt, 3.2)])
def test_what_was_being_compiled_when_an_exception_came_can_be_compiled_again(
    error: type[BaseException], scale: float
) -> None:
    wait = AsyncCompile._wait_futures
    with pytest.raises(error), late_waits():  # noqa: PT012
        compiled(scale)
        raise error
    assert AsyncCompile._wait_futures is wait
    assert_right(compiled(scale), scale)


def test_an_inductor_that_waits_elsewhere_waits_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = AsyncCompile._wait_futures
    monkeypatch.delattr(AsyncCompile, "_wait_futures")
    monkeypatch.setattr(AsyncCompile, "wait", wait)
    with late_waits():
        assert_right(compiled(4.1), 4.1)
    assert not hasattr(AsyncCompile, "_wait_futures")


def test_sources_are_read_once_and_kept_with_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs of the same two functions know of both, as without; a later process takes them."""
    plain = compiled(5.1, code="plain")._run.source_info().inlined_sources
    assert len(plain) == 2
    num_read: Counter[CodeType] = Counter()
    add_code = SourceInfo.add_code

    def count(self: SourceInfo, code: CodeType) -> None:
        num_read[code] += 1
        add_code(self, code)

    monkeypatch.setattr(SourceInfo, "add_code", count)
    with sources_read_once():
        functions = [compiled(scale, code="once") for scale in (5.1, 5.2)]
    assert SourceInfo.add_code is count
    assert num_read == {scaled.__code__: 1, scaled_sum.__code__: 1}
    assert [function._run.source_info().inlined_sources for function in functions] == [plain, plain]
    before = counters["stats"]["unique_graphs"]
    again = compiled(5.2, code="once")
    assert counters["stats"]["unique_graphs"] == before
    assert again._run.source_info().inlined_sources == plain
    assert_right(again, 5.2)


def test_sources_are_read_as_before_after_an_exception() -> None:
    add_code = SourceInfo.add_code
    with pytest.raises(KeyboardInterrupt), sources_read_once():
        raise KeyboardInterrupt
    assert SourceInfo.add_code is add_code


def test_the_instructions_are_those_that_inductors_trial_programs_would_find(tmp_path: Path) -> None:
    """In processes that have not picked yet, with empty caches."""
    ours = "from hybrid_runtime.graphs.inductor import pick_instructions; pick_instructions()"
    picked = []
    for place, first in enumerate(("", ours)):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(place))}
        command = [sys.executable, "-c", PICK.format(first=first)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        picked.append(done.stdout)
    assert picked[0] == picked[1]
    assert picked[0].startswith("Vec")


def test_only_matrix_instructions_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def check_build(self: VecISA, code: str) -> bool:
        tried.append(code)
        return False

    codes = [VecISA._avx_code, VecAVX512._avx512_bf16_code, VecAMX._amx_code, VecAMX._amx_fp16_code]
    answers: list[bool] = []
    monkeypatch.setattr(VecISA, "check_build", check_build)
    monkeypatch.setattr(
        cpu_vec_isa, "pick_vec_isa", lambda: answers.extend(VecAMX().check_build(code) for code in codes)
    )
    pick_instructions.__wrapped__()
    assert answers == [True, True, False, False]
    assert tried == codes[2:]
    assert VecISA.check_build is check_build


def test_the_trial_is_as_before_where_no_instructions_can_be_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no compiler")

    check_build = VecISA.check_build
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", fail)
    with pytest.raises(OSError, match="no compiler"):
        pick_instructions.__wrapped__()
    assert VecISA.check_build is check_build


def test_graphs_include_the_header_that_was_compiled_ahead(folder: Path) -> None:
    compiled(6.1)
    assert num_done(folder, "-x c++-header") == 1


def test_a_header_that_cannot_be_compiled_ahead_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    with caplog.at_level(logging.INFO, inductor.__name__), monkeypatch.context() as patch:
        patch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding", fail)
        with nobody_has_asked_for_headers():
            for _ in range(2):  # it is tried once
                inductor.start_precompiling_headers()
            inductor._precompiling_headers().join()
    assert [record.getMessage() for record in caplog.records if record.name == inductor.__name__] == [
        "Inductor's headers are not compiled ahead: out of luck"
    ]
    assert_right(compiled(7.1), 7.1)

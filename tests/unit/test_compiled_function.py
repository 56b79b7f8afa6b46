"""Functions compiled ahead of their first call: kept for later processes, and only for the same code and arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hybrid_runtime.graphs.compiled import CompiledFunction, mark_dynamic
from hybrid_runtime.graphs.signature import signature


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "hybrid_runtime"


def scaled_sum(x: Tensor, pair: SimpleNamespace) -> Tensor:
    return (pair.scale * x + pair.shift).sum(dim=-1)


def example(scale: float = 2.0, width: int = 3) -> tuple[Tensor, SimpleNamespace]:
    x = torch.zeros(4, width)
    mark_dynamic([x])
    return x, SimpleNamespace(scale=scale, shift=torch.ones(width))


def compiled(code: str = "a", scale: float = 2.0, width: int = 3) -> tuple[CompiledFunction, int]:
    """The function, and how many graphs had to be traced for it."""
    before = counters["stats"]["unique_graphs"]
    function = CompiledFunction(scaled_sum, *example(scale, width), code=code)
    return function, counters["stats"]["unique_graphs"] - before


def assert_right(function: CompiledFunction, scale: float = 2.0, width: int = 3) -> None:
    for num_rows in (1, 2, 5):
        x, pair = torch.randn(num_rows, width), SimpleNamespace(scale=scale, shift=torch.randn(width))
        torch.testing.assert_close(function(x, pair), scaled_sum(x, pair))


def test_a_later_process_loads_what_an_earlier_one_compiled(folder: Path) -> None:
    """Another object with the same arguments finds the file; sizes that are marked may differ, down to 1."""
    first, num_traced = compiled()
    assert num_traced == 1
    assert len(list(folder.iterdir())) == 1
    assert_right(first)
    again, num_traced = compiled()
    assert num_traced == 0
    assert_right(again)


@pytest.mark.parametrize("other", [{"code": "b"}, {"scale": 3.0}, {"width": 4}], ids=str)
def test_other_code_or_arguments_are_compiled_anew(folder: Path, other: dict[str, object]) -> None:
    compiled()
    function, num_traced = compiled(**other)  # type: ignore[arg-type]
    assert num_traced == 1
    assert len(list(folder.iterdir())) == 2
    sizes = {name: value for name, value in other.items() if name != "code"}
    assert_right(function, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"not a pickle", None])
def test_a_damaged_file_is_compiled_anew(folder: Path, content: bytes | None) -> None:
    compiled()
    [path] = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    function, num_traced = compiled()
    assert num_traced == 1
    assert_right(function)
    assert compiled()[1] == 0, "the damaged file was not replaced"


def test_other_arguments_are_noticed_when_asked() -> None:
    function, _ = compiled()
    function.require_same(*example())
    for scale, width in ((3.0, 3), (2.0, 4)):
        with pytest.raises(ValueError, match="compiled for other arguments"):
            function.require_same(*example(scale, width))
    x, pair = example()
    with pytest.raises(ValueError, match="float32"):
        function.require_same(x.double(), pair)
    with pytest.raises(ValueError, match="shift"):
        function.require_same(x, SimpleNamespace(scale=2.0, shift=torch.ones(6)[::2]))


def test_a_graph_break_is_an_error() -> None:
    def breaks(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        CompiledFunction(breaks, torch.ones(3), code="a")


def test_a_size_of_one_is_not_marked() -> None:
    with pytest.raises(ValueError, match="would be compiled in"):
        mark_dynamic([torch.zeros(1, 3)])


def test_signature_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="set"):
        signature({"a": {1, 2}})


def test_signature_tells_one_tensor_given_twice_from_two() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    assert signature((one, other)) == signature((other, one))
    assert signature((one, one)) == signature((other, other)) != signature((one, other))

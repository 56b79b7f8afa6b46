"""Imports point one way: data, then control beside compute, capture, models, glue. Read from the source text.

Imports inside functions count; those under `if TYPE_CHECKING:` do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import hybrid_runtime

ROOT = Path(__file__).parents[2]
SOURCES = {
    "hybrid_runtime": ROOT / "hybrid_runtime",
    "hybrid_runtime.ops": ROOT / "ops",
    "hybrid_runtime.graphs": ROOT / "graphs",
}
PACKAGE = "hybrid_runtime"
ANYTHING = frozenset({"*"})


@dataclass(frozen=True)
class Layer:
    """What a layer is made of (the longest matching prefix decides), and what it may import besides itself.

    `packages` are third-party; the standard library is open to all.
    """

    modules: frozenset[str]
    layers: frozenset[str]
    packages: frozenset[str]


def layer(modules: str, *, layers: str = "", packages: str | frozenset[str] = "") -> Layer:
    return Layer(
        frozenset(f"{PACKAGE}.{name}" if name != "." else PACKAGE for name in modules.split()),
        frozenset(layers.split()),
        frozenset(packages.split()) if isinstance(packages, str) else packages,
    )


LAYERS = {
    "data": layer(". errors config field_checks sampling_params speculative_config outputs memory"),
    "slots": layer("memory.slots", packages="numpy"),
    "control": layer(
        "cache scheduling speculative text memory.allocator memory.request_table",
        layers="data slots",
        packages="numpy",
    ),
    "inspection": layer("inspection", layers="data slots control", packages="numpy rich"),
    "compute": layer("ops", packages="torch einops triton"),
    "capture": layer("graphs", layers="compute", packages="torch numpy"),
    "lowering": layer("graphs.lowering", layers="capture", packages="torch triton numpy"),
    "models": layer(
        "models sampling memory.available memory.plan memory.pools memory.host_file memory.host_plan memory.host_store "
        "memory.records",
        layers="data slots compute capture",
        packages="torch einops numpy transformers safetensors",
    ),
    "glue": layer(
        "runtime engine cli __main__ demo training walkthrough lowering_report",
        layers="data slots control inspection compute capture lowering models",
        packages=ANYTHING,
    ),
}


@cache
def read_sources() -> Mapping[str, str]:
    """Source of every module of the package, by its import name."""
    sources = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            if path.resolve() != path and package == PACKAGE:
                continue  # behind a link: listed under its own folder
            parts = path.relative_to(folder).with_suffix("").parts
            sources[".".join([package, *(part for part in parts if part != "__init__")])] = path.read_text()
    return sources


def module_sources() -> dict[str, str]:
    """A copy of the sources, to plant imports in."""
    return dict(read_sources())


@cache
def imported_names(name: str, source: str, *, is_package: bool) -> tuple[str, ...]:
    """Everything a module imports, as dotted names; `from a import b` gives `a.b`."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for branch in node.orelse:
                yield from visit(branch)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = name.split(".")
                anchor = anchor[: len(anchor) - node.level + is_package]
                base = ".".join([*anchor, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return tuple(visit(ast.parse(source)))


def layer_of(module: str) -> str | None:
    """The layer of a module; None if the table does not name it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        # The package's own entry is for its __init__: a module beside it has to be named.
        if length > 1 or len(parts) == 1:
            for name, each in LAYERS.items():
                if prefix in each.modules:
                    return name
    return None


def violations(sources: Mapping[str, str]) -> list[str]:
    """One line for each import that the table forbids, and for each module that it does not name."""
    found = []
    packages = {name.rpartition(".")[0] for name in sources}
    public_homes = {public: f"{PACKAGE}.{home}" for public, home in hybrid_runtime._HOMES.items()}
    for name, source in sources.items():
        own = layer_of(name)
        if own is None:
            found.append(f"{name} is in no layer")
            continue
        for imported in imported_names(name, source, is_package=name in packages):
            root, _, rest = imported.partition(".")
            if root != PACKAGE:
                if root not in sys.stdlib_module_names | LAYERS[own].packages and LAYERS[own].packages != ANYTHING:
                    found.append(f"{name} ({own}) imports {imported}")
                if root in ("ops", "graphs"):
                    found.append(f"{name} imports the top-level {root}")
                continue
            # The longest front of the dotted name that is a module; a public name of the package is its home's.
            target = public_homes.get(rest, imported)
            while target not in sources and target != PACKAGE:
                target = target.rpartition(".")[0]
            other = layer_of(target)
            if other != own and other not in LAYERS[own].layers:
                found.append(f"{name} ({own}) imports {target} ({other})")
    return found


def test_no_module_imports_upwards():
    assert violations(module_sources()) == []


def test_every_folder_is_read():
    names = set(module_sources())
    assert {"hybrid_runtime", "hybrid_runtime.cache.radix_cache", "hybrid_runtime.models.mixers.kda"} <= names
    assert {"hybrid_runtime.ops.ragged", "hybrid_runtime.graphs.step_inputs"} <= names


@pytest.mark.parametrize(
    ("module", "planted", "complaint"),
    [
        ("cache.node", "import torch", "(control) imports torch"),
        ("cache.node", "def late():\n    import torch.nn", "(control) imports torch.nn"),
        ("config", "import numpy as np", "(data) imports numpy"),
        ("config", "from hybrid_runtime.cache.node import Node", "imports hybrid_runtime.cache.node (control)"),
        ("cache.node", "from hybrid_runtime import HybridRuntime", "imports hybrid_runtime.runtime (glue)"),
        ("cache.node", "from ..memory import pools", "imports hybrid_runtime.memory.pools (models)"),
        ("scheduling.budget", "from hybrid_runtime.engine.engine import Engine", "engine.engine (glue)"),
        ("models.spec", "from hybrid_runtime.scheduling import scheduler", "scheduling.scheduler (control)"),
        ("models.spec", "from hybrid_runtime.runtime import HybridRuntime", "hybrid_runtime.runtime (glue)"),
        ("ops.norms", "from hybrid_runtime.errors import PoolExhausted", "hybrid_runtime.errors (data)"),
        ("ops.norms", "from hybrid_runtime.graphs.step_inputs import StepMemory", "graphs.step_inputs (capture)"),
        ("graphs.step_inputs", "from hybrid_runtime.memory.pools import Pool", "memory.pools (models)"),
        ("engine.engine", "from ops.ragged import RaggedLayout", "imports the top-level ops"),
        ("novelty", "", "is in no layer"),
        ("memory.novelty", "import torch", "(data) imports torch"),
    ],
)
def test_a_planted_upward_import_is_found(module, planted, complaint):
    sources = module_sources()
    name = f"{PACKAGE}.{module}"
    sources[name] = sources.get(name, "") + "\n" + planted + "\n"
    (found,) = [line for line in violations(sources) if "(glue) imports ops.ragged" not in line]
    assert found.startswith(name)
    assert complaint in found


def test_imports_for_the_type_checker_do_not_count():
    sources = module_sources()
    sources[f"{PACKAGE}.cache.node"] += "\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
    assert violations(sources) == []


@pytest.mark.parametrize("folder", ["tests", "profiles"])
def test_nobody_imports_the_top_level_ops_or_graphs(folder):
    for path in (ROOT / folder).rglob("*.py"):
        roots = {name.partition(".")[0] for name in imported_names("x", path.read_text(), is_package=False)}
        assert not roots & {"ops", "graphs"}, path


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_data_and_control_import_no_torch_even_indirectly():
    names = [name for name in module_sources() if layer_of(name) in ("data", "slots", "control")]
    imports = "\n".join(f"import {name}" for name in names)
    heavy = run_python(f"import sys\n{imports}\nprint(sorted({{'torch', 'transformers'}} & set(sys.modules)))")
    assert len(names) > 20
    assert heavy == "[]"


def test_the_package_itself_imports_nothing_until_asked():
    loaded = run_python(
        "import sys, hybrid_runtime\nprint(sorted(n for n in sys.modules if n.startswith('hybrid_runtime')))\n"
        "hybrid_runtime.SamplingParams\nprint({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    assert loaded == "['hybrid_runtime']\nset()"

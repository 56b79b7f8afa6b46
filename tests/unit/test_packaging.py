"""What gets installed is what is in the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hybrid_runtime

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = {
    "hybrid_runtime": ROOT / "hybrid_runtime",
    "hybrid_runtime.ops": ROOT / "ops",
    "hybrid_runtime.graphs": ROOT / "graphs",
}


def package_folders() -> dict[str, Path]:
    """Every folder that holds Python files, by its import name."""
    folders = {}
    for package, top in FOLDERS.items():
        for folder, subfolders, files in os.walk(top):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            if any(name.endswith(".py") for name in files):
                folders[".".join([package, *Path(folder).relative_to(top).parts])] = Path(folder)
    return folders


def test_every_package_folder_is_installed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_folders())


def test_every_package_folder_is_a_package():
    assert [name for name, folder in package_folders().items() if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", ["ops", "graphs"])
def test_the_outer_folders_are_mapped_and_linked(name):
    assert SETUPTOOLS["package-dir"][f"hybrid_runtime.{name}"] == name
    link = ROOT / "hybrid_runtime" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == (ROOT / name).resolve()


def test_the_installed_package_says_that_it_is_typed():
    assert "py.typed" in SETUPTOOLS["package-data"]["hybrid_runtime"]
    assert (ROOT / "hybrid_runtime" / "py.typed").is_file()


def test_every_public_name_resolves():
    assert sorted(hybrid_runtime.__all__) == hybrid_runtime.__all__
    for name in hybrid_runtime.__all__:
        value = getattr(hybrid_runtime, name)
        assert name == "__version__" or value.__name__ == name
    assert set(hybrid_runtime.__all__) == {*hybrid_runtime._HOMES, "__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        hybrid_runtime.no_such_name  # noqa: B018  # the access is what is tested


def test_the_version_is_the_projects():
    assert hybrid_runtime.__version__ == PROJECT["project"]["version"]


def test_the_kernels_of_all_devices_can_be_imported_together() -> None:
    """Their operators must not share names: a process may have a model on each."""
    modules = ("cpu_kernels", "triton_kernels", "opaque")
    code = ", ".join(f"hybrid_runtime.ops.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"import {code}"], check=True, cwd=ROOT)

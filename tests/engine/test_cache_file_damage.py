"""Files that are damaged, odd, or another runtime's: refused, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.engine.checked_tensors import CheckedWriter
from tests.engine.helpers import (
    runtime_of,
)
from tests.engine.saved_caches import everything_in


def test_every_byte_of_the_header_and_any_of_the_data_counts(
    saved: Path, reader: HybridRuntime, tmp_path: Path
) -> None:
    """One bit is flipped at a time: in the length, all through the header, and at places all over the tensors."""
    good = saved.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(13)
    places = [*range(8), *range(8, header, 7), header, len(good) - 1, *rng.integers(header, len(good), 30).tolist()]
    before, path = everything_in(reader), tmp_path / "bad"
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="truncated, corrupted, or no file of this kind"):
            reader.load_prefix_cache(path)
    assert everything_in(reader) == before


def test_a_truncated_or_longer_file_is_refused(saved: Path, reader: HybridRuntime, tmp_path: Path) -> None:
    good = saved.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    before, path = everything_in(reader), tmp_path / "bad"
    for length in [*range(10), header - 1, header, header + 1, *range(header, len(good), 9973), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match="truncated"):
            reader.load_prefix_cache(path)
    for extra in (good + b"\0", b"{}" * 100, bytes(100), b"\xff" * 100):
        path.write_bytes(extra)
        with pytest.raises(ValueError, match="truncated"):
            reader.load_prefix_cache(path)
    assert everything_in(reader) == before


Change = Callable[[dict[str, torch.Tensor], dict[str, str]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata.update(version="2"), "format 'hybrid_runtime.prefix_cache', version '2'"),
        (lambda tensors, metadata: metadata.update(format="other"), "it says format 'other'"),
        (lambda tensors, metadata: metadata.update(layouts="{"), "cannot be read"),
        (lambda tensors, metadata: metadata.update(origins="3"), "cannot be read"),
        (lambda tensors, metadata: metadata.update(origins="[]"), "cannot be read"),
        (lambda tensors, metadata: tensors.pop("parents"), "cannot be read"),
        (lambda tensors, metadata: tensors.pop("kv.0.k"), "tensors that do not fit"),
        (lambda tensors, metadata: tensors.update(more=torch.zeros(2)), "tensors that do not fit"),
        (lambda tensors, metadata: tensors.update({"kv.0.k": tensors["kv.0.k"].float()}), "tensors that do not fit"),
        (lambda tensors, metadata: tensors.update({"kv.0.k": tensors["kv.0.k"][1:]}), "tensors that do not fit"),
        (lambda tensors, metadata: tensors["parents"].fill_(5), "a node before its parent"),
        (lambda tensors, metadata: tensors["parents"].fill_(-2), "a node before its parent"),
        (lambda tensors, metadata: tensors["parents"].fill_(-1), "siblings that start with the same token"),
        (lambda tensors, metadata: tensors["lengths"].add_(1), "edges that do not add up"),
        (lambda tensors, metadata: tensors["checkpoints"].fill_(0), "two states of one node"),
        (lambda tensors, metadata: tensors["checkpoints"].fill_(10**6), "a state of no node"),
        (lambda tensors, metadata: tensors["tokens"].neg_(), "a negative token"),
        (lambda tensors, metadata: metadata.update(weights="0" * 64), "other weights"),
        (
            lambda tensors, metadata: metadata.update(origins='["why", 1, "tail", "hint"]'),
            "a state of an unknown origin",
        ),
        (lambda tensors, metadata: metadata.update(origins='[["a"], ["b"], ["c"], ["d"]]'), "cannot be read"),
        (lambda tensors, metadata: metadata.update(origins="[" * 100_000), "cannot be read"),
        (lambda tensors, metadata: tensors["origins"].fill_(-1), "a state of an unknown origin"),
    ],
)
def test_a_whole_file_with_wrong_contents_is_refused(
    saved: Path, reader: HybridRuntime, tmp_path: Path, change: Change, message: str
) -> None:
    """The checksum is right: such a file was written by something else."""
    tensors = safetensors.torch.load_file(saved)
    with safetensors.safe_open(saved, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "checksum"}
    change(tensors, metadata)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with CheckedWriter(tmp_path / "odd", shapes, metadata) as writer:
        for name, tensor in tensors.items():
            writer.write_rows(name, tensor)
    before = everything_in(reader)
    with pytest.raises(ValueError, match=message):
        reader.load_prefix_cache(tmp_path / "odd")
    assert everything_in(reader) == before


def test_another_model_or_other_pools_are_refused_and_the_difference_named(saved: Path) -> None:
    for kind, options, message in (
        ("gdn", {}, "another layout of the kv pool"),
        ("mamba2", {"kv_dtype": "float32"}, r"another dtype: KV \['float64'\].* there, \['float32'\]"),
        ("mamba2", {"dtype": "float32"}, "another dtype"),
    ):
        with runtime_of(kind, **options) as rt:
            with pytest.raises(ValueError, match=message):
                rt.load_prefix_cache(saved)
            assert rt.prefix_cache.num_nodes == 0


def test_weights_that_were_changed_in_place_are_noticed(saved: Path) -> None:
    """The last element of one weight, by one bit or so: what was computed with the old ones is of no use."""
    with runtime_of("mamba2") as rt:
        assert rt.load_prefix_cache(saved).num_checkpoints > 0
        rt.reset_prefix_cache()
        weight = rt.model.weights.lm_head.weight_OI
        with torch.no_grad():
            old = weight[-1, -1].item()
            weight[-1, -1] += 1e-9
            with pytest.raises(ValueError, match="other weights"):
                rt.load_prefix_cache(saved)
            weight[-1, -1] = old
        assert rt.load_prefix_cache(saved).num_checkpoints > 0


def test_bad_paths(reader: HybridRuntime, tmp_path: Path) -> None:
    before = everything_in(reader)
    with pytest.raises(FileNotFoundError):
        reader.load_prefix_cache(tmp_path / "none")
    with pytest.raises(OSError, match="directory"):
        reader.load_prefix_cache(tmp_path)
    with pytest.raises(FileNotFoundError, match="the prefix cache cannot be saved"):
        reader.save_prefix_cache(tmp_path / "none" / "cache")
    with pytest.raises(OSError, match="the prefix cache cannot be saved"):
        reader.save_prefix_cache(tmp_path)
    with pytest.raises(ValueError, match="path must be the path of a file, not 3"):
        reader.save_prefix_cache(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path must be the path of a file, not ''"):
        reader.save_prefix_cache("")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="something that is no file"):
        reader.save_prefix_cache(tmp_path / "fifo")
    (tmp_path / "fifo").unlink()
    assert everything_in(reader) == before
    assert list(tmp_path.iterdir()) == []

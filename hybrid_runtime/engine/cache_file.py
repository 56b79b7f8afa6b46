"""Keeps a prefix cache across restarts: one safetensors file with the trees, the KV, the states and a fingerprint."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hybrid_runtime.cache.results import Checkpoint
from hybrid_runtime.engine.cache_index import CacheIndex, merge_trees
from hybrid_runtime.engine.checked_tensors import CheckedReader, CheckedWriter
from hybrid_runtime.engine.fingerprint import PoolLayouts, SlotLayout, weights_digest
from hybrid_runtime.engine.host_cache import PoolStore
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.memory.host_store import MAX_CHUNK_BYTES, PoolSlots, Rows, SlotContents, chunks
from hybrid_runtime.memory.pools import LayerSpec, Pool, TensorSpec, bytes_per_slot
from hybrid_runtime.memory.slots import SlotArray, StateSlot
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.outputs import PrefixCacheFile
from hybrid_runtime.scheduling.paths import checkpoint_at_end
from hybrid_runtime.scheduling.placement import ORIGINS
from hybrid_runtime.scheduling.supply import SlotSupply

FORMAT = "hybrid_runtime.prefix_cache"
VERSION = "1"
INDEX_NAMES = ("tokens", "parents", "lengths", "checkpoints", "origins")

_Place: TypeAlias = tuple[SlotContents, int]
"""Contents and the number of slots there."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Tier:
    """One of the places where the cache's contents are."""

    supply: SlotSupply
    kv: SlotContents
    states: SlotContents


def save_cache(path: str | os.PathLike[str], memory: EngineMemory, model: HybridModel) -> PrefixCacheFile:
    """Writes all checkpoints of both tiers and their KV to a file, in place of what is there. Changes no tier.

    Holds a few megabytes of contents at a time. Raises OSError, and leaves the old file as it was, if that fails.
    """
    target = os.path.realpath(path)  # of a link, what it points to is written
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "the prefix cache cannot be saved: there is something that is no file", target)
    tiers = _tiers(memory)
    index, slots = merge_trees([tier.supply for tier in tiers])
    names = sorted(set(index.origins))
    origins = np.array([names.index(origin) for origin in index.origins], dtype=np.int32)
    arrays = (index.tokens, index.parents, index.lengths, index.checkpoints, origins)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "origins": json.dumps(names),
        "layouts": _layouts(memory).as_json(),
        "weights": weights_digest(model),
    }
    kv_places = [(tier.kv, tier.supply.kv.num_slots) for tier in tiers]
    state_places = [(tier.states, tier.supply.states.num_slots) for tier in tiers]
    try:
        with CheckedWriter(target, _tensors_of(index, memory), metadata) as writer:
            for name, array in zip(INDEX_NAMES, arrays, strict=True):
                writer.write_rows(name, torch.from_numpy(array))
            _write_contents(writer, "kv", _specs(memory.kv_pool), slots.kv, kv_places)
            _write_contents(writer, "state", _specs(memory.state_pool), slots.states, state_places)
    except OSError as error:
        message = f"the prefix cache cannot be saved: {error.strerror or error}"
        raise OSError(error.errno, message, os.fspath(path)) from error
    return PrefixCacheFile(len(slots.states), len(slots.kv), writer.num_bytes)


def load_cache(path: str | os.PathLike[str], memory: EngineMemory, model: HybridModel) -> PrefixCacheFile:
    """Adds what a file holds to the cache: to free slots of the device, and what does not fit there to the host's.

    The most useful checkpoints come first, and nothing that is in the cache is evicted for them. Everything is verified
    and read before the trees are touched, so that these errors leave everything as it was: ValueError for a file that
    is not whole, or that another model or other pools left; OSError where it can't be read. After any other exception
    the trees and the slots' owners may be half changed.
    """
    with closing(CheckedReader(path)) as reader:
        index = _verify(reader, memory, model)
        plans: list[_LoadPlan] = []
        wanted: Sequence[int] = range(len(index.checkpoints))
        try:
            for tier in _tiers(memory):
                plan = _LoadPlan(index, tier, wanted)
                plans.append(plan)
                wanted = plan.rejected
                plan.take_slots()
                _read_contents(reader, "kv", _specs(memory.kv_pool), plan.kv_slots, tier.kv)
                _read_contents(reader, "state", _specs(memory.state_pool), plan.state_slots, tier.states)
        except Exception:
            for plan in plans:
                plan.release_slots()
            raise
        try:
            for plan in plans:
                plan.insert()
        except Exception as error:
            raise RuntimeError("the checkpoints of the file could not be inserted: the cache starts over") from error
    num_tokens = sum(int(np.count_nonzero(plan.kv_slots)) for plan in plans)
    num_checkpoints = sum(len(plan.chosen) for plan in plans)
    kv_bytes, state_bytes = bytes_per_slot(_specs(memory.kv_pool)), bytes_per_slot(_specs(memory.state_pool))
    return PrefixCacheFile(num_checkpoints, num_tokens, num_tokens * kv_bytes + num_checkpoints * state_bytes)


class _LoadPlan:
    """Which checkpoints of a file go to a tier, and to which slots. Without evictions in between, all fits.

    `kv_slots` (`[T]`) and `state_slots` (`[C]`) are the tier's slots for each token and checkpoint of the file; 0 for
    those that the tier has already or has no room for.
    """

    def __init__(self, index: CacheIndex, tier: _Tier, wanted: Iterable[int]) -> None:
        self._index = index
        self._supply = tier.supply
        self.chosen: list[int] = []
        self.rejected: list[int] = []
        self._is_needed: NDArray[np.bool_] = np.zeros(len(index.tokens), dtype=np.bool_)
        self.kv_slots: SlotArray = np.zeros(len(index.tokens), dtype=np.int32)
        self.state_slots: SlotArray = np.zeros(len(index.checkpoints), dtype=np.int32)
        num_free_kv, num_free_states = tier.supply.kv.num_free, tier.supply.states.num_free
        for checkpoint in wanted:
            rows = index.rows(checkpoint)
            tokens = index.tokens[rows]
            if checkpoint_at_end(tier.supply.cache, tokens) is not None:
                continue
            missing = rows[tier.supply.cache.walk(tokens).length :]
            missing = missing[~self._is_needed[missing]]
            if len(missing) > num_free_kv or num_free_states == 0:
                self.rejected.append(checkpoint)
                continue
            self._is_needed[missing] = True
            num_free_kv -= len(missing)
            num_free_states -= 1
            self.chosen.append(checkpoint)

    def take_slots(self) -> None:
        """From the free lists alone."""
        self.kv_slots[self._is_needed] = np.sort(self._supply.kv.allocate(int(self._is_needed.sum())))
        self.state_slots[self.chosen] = np.sort(self._supply.states.allocate(len(self.chosen)))

    def release_slots(self) -> None:
        """Undoes `take_slots`, if it was called."""
        self._supply.release_kv(self.kv_slots[self.kv_slots > 0])
        self._supply.release_states(self.state_slots[self.state_slots > 0].tolist())

    def insert(self) -> None:
        """Gives the filled slots to the tree; the most useful checkpoint becomes the most recently used."""
        for checkpoint in reversed(self.chosen):
            rows = self._index.rows(checkpoint)
            tokens = self._index.tokens[rows]
            walk = self._supply.cache.walk(tokens)
            kv_slots = np.concatenate([walk.kv_slots(walk.length), self.kv_slots[rows[walk.length :]]])
            slot = StateSlot(int(self.state_slots[checkpoint]))
            result = self._supply.cache.insert(
                tokens,
                kv_slots,
                [Checkpoint(len(tokens), slot, self._index.origins[checkpoint])],
                protected_length=walk.length,
            )
            assert result.num_attached == 1


def _verify(reader: CheckedReader, memory: EngineMemory, model: HybridModel) -> CacheIndex:
    """The index of a sound file that fits this model and these pools. Raises ValueError for any other."""
    metadata = reader.metadata
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise reader.damaged(f"it says format {metadata.get('format')!r}, version {metadata.get('version')!r}")
    try:
        difference = _layouts(memory).difference(metadata["layouts"])
        names = json.loads(metadata["origins"])
        tokens, parents, lengths, checkpoints, origins = (
            reader.read_rows(name, 0, reader.entries[name].shape[0]).numpy() for name in INDEX_NAMES
        )
        index = CacheIndex(tokens, parents, lengths, checkpoints, tuple(names[place] for place in origins))
        fault = index.fault()
        if fault is None and (not set(index.origins) <= set(ORIGINS) or (origins < 0).any()):
            fault = "a state of an unknown origin"
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise reader.damaged(f"its contents cannot be read ({type(error).__name__}: {error})") from error
    if difference is not None:
        raise ValueError(f"{reader.path!r} was saved by a runtime with {difference}")
    if metadata.get("weights") != weights_digest(model):
        raise ValueError(f"{reader.path!r} was saved with other weights, or other options of the model")
    stated = {name: (entry.dtype, entry.shape) for name, entry in reader.entries.items()}
    if fault is None and stated != _tensors_of(index, memory):
        fault = "tensors that do not fit its tree"
    if fault is not None:
        raise reader.damaged(f"it has {fault}")
    return index


def _tensors_of(index: CacheIndex, memory: EngineMemory) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a file."""
    num_tokens, num_nodes, num_states = len(index.tokens), len(index.parents), len(index.checkpoints)
    sizes = (num_tokens, num_nodes, num_nodes, num_states, num_states)
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (torch.int32, (size,)) for name, size in zip(INDEX_NAMES, sizes, strict=True)
    }
    for kind, pool, size in (("kv", memory.kv_pool, num_tokens), ("state", memory.state_pool, num_states)):
        for place, layer in enumerate(_specs(pool)):
            tensors |= {f"{kind}.{place}.{name}": (spec.dtype, (size, *spec.shape)) for name, spec in layer.items()}
    return tensors


def _write_contents(
    writer: CheckedWriter, kind: str, specs: Sequence[LayerSpec], slots: SlotArray, places: Sequence[_Place]
) -> None:
    """Appends the contents of `slots`, numbered through all places, to the tensors of their kind."""
    for part in chunks(len(slots), _chunk(specs)):
        for layer, rows in enumerate(_read_numbered(specs, slots[part], places)):
            for name, tensor in rows.items():
                writer.write_rows(f"{kind}.{layer}.{name}", tensor)


def _read_numbered(specs: Sequence[LayerSpec], slots: SlotArray, places: Sequence[_Place]) -> Rows:
    rows = tuple(
        {name: torch.empty(len(slots), *spec.shape, dtype=spec.dtype) for name, spec in layer.items()}
        for layer in specs
    )
    offset = 0
    for contents, num_slots in places:
        (chosen,) = np.nonzero((slots > offset) & (slots <= offset + num_slots))
        if len(chosen):
            part = contents.read((slots[chosen] - offset).astype(np.int32), _CPU)
            for layer, given in zip(rows, part, strict=True):
                for name, tensor in layer.items():
                    tensor[torch.from_numpy(chosen)] = given[name]
        offset += num_slots
    return rows


def _read_contents(
    reader: CheckedReader, kind: str, specs: Sequence[LayerSpec], slots: SlotArray, contents: SlotContents
) -> None:
    """Reads row i of the tensors of a kind into slot `slots[i]`, where that is not 0."""
    for part in chunks(len(slots), _chunk(specs)):
        (chosen,) = np.nonzero(slots[part])
        if not len(chosen):
            continue
        rows = tuple(
            {
                name: reader.read_rows(f"{kind}.{layer}.{name}", part.start, part.stop)[torch.from_numpy(chosen)]
                for name in spec
            }
            for layer, spec in enumerate(specs)
        )
        contents.write(slots[part][chosen], rows)


def _tiers(memory: EngineMemory) -> list[_Tier]:
    device = memory.device_table.device
    kv, states = PoolSlots(memory.kv_pool, device), PoolSlots(memory.state_pool, device)
    tiers = [_Tier(memory.supply, kv, states)]
    if memory.tier is not None:
        store = memory.tier.store
        assert isinstance(store, PoolStore)
        tiers.append(_Tier(memory.tier.host, store.kv.outside, store.states.outside))
    return tiers


def _layouts(memory: EngineMemory) -> PoolLayouts:
    return PoolLayouts(SlotLayout.of(_specs(memory.kv_pool)), SlotLayout.of(_specs(memory.state_pool)))


def _specs(pool: Pool) -> tuple[LayerSpec, ...]:
    return tuple(
        {name: TensorSpec(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in layer.items()}
        for layer in pool.layers
    )


def _chunk(specs: Sequence[LayerSpec]) -> int:
    return max(1, MAX_CHUNK_BYTES // max(1, bytes_per_slot(specs)))

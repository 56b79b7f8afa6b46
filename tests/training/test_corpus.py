"""The corpus of standard-library sources: a split that never moves, batches that never stray into the held-out half."""

from __future__ import annotations

import lzma
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.training.corpus import is_held_out, num_bytes, read_corpus, xz_bits_per_byte
from hybrid_runtime.training.data import TokenBatches

# Part of the checkpoint's meaning: moving any of these to the other half would train on what is measured.
KNOWN_HELD_OUT = {"operator.py", "asyncio/locks.py", "asyncio/queues.py", "urllib/robotparser.py"}
KNOWN_TRAINED = {"os.py", "typing.py", "heapq.py", "json/decoder.py"}


@pytest.fixture
def library(tmp_path):
    """A small tree of sources with everything the corpus must leave out."""
    for index in range(100):
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / f"m{index}.py").write_bytes(f"x = {index}\r\n".encode())
    for folder in ("site-packages", "__pycache__", "package/__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "left_out.py").write_text("1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no Python\n")
    return tmp_path


def test_every_file_is_in_exactly_one_half(library):
    corpus = read_corpus(library)
    train, held_out = ({file.path for file in half} for half in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert train | held_out == {f"package/m{index}.py" for index in range(100)}
    assert held_out


def test_the_text_of_a_file_is_its_bytes(library):
    for half in (read_corpus(library).train, read_corpus(library).held_out):
        for file in half:
            assert file.data == (library / file.path).read_bytes()


def test_a_new_file_moves_no_other(library):
    before = {file.path for file in read_corpus(library).held_out}
    for index in range(20):
        (library / f"new{index}.py").write_text("1\n")
    after = {file.path for file in read_corpus(library).held_out}
    assert {path for path in after if path.startswith("package/")} == before


@pytest.mark.parametrize("path", sorted(KNOWN_HELD_OUT))
def test_known_held_out_files_stay_held_out(path):
    assert is_held_out(path)


@pytest.mark.parametrize("path", sorted(KNOWN_TRAINED))
def test_known_training_files_stay_in_training(path):
    assert not is_held_out(path)


def test_about_a_tenth_of_the_standard_library_is_held_out():
    corpus = read_corpus()
    share = num_bytes(corpus.held_out) / (num_bytes(corpus.held_out) + num_bytes(corpus.train))
    assert 0.05 < share < 0.2


def test_xz_is_charged_per_byte_of_text(library):
    files = read_corpus(library).held_out
    bits = xz_bits_per_byte(files) * num_bytes(files)
    # a tar of all texts can't be shorter than the texts' own compressed bytes, less xz's framing
    assert bits > 8 * len(lzma.compress(b"".join(file.data for file in files), preset=9)) - 8 * 64
    assert bits % 8 == pytest.approx(0, abs=1e-6)


def batches_of(lengths, length, batch_size, seed, count, start=0):
    """The first `count` batches of files whose tokens all differ, from batch `start`."""
    bounds = np.cumsum([1, *lengths])
    files = [np.arange(a, b, dtype=np.uint16) for a, b in pairwise(bounds)]
    batches = TokenBatches(files, length, batch_size, seed)
    stream = batches.starting_at(start)
    return batches, [next(stream) for _ in range(count)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    length=st.integers(1, 12),
    batch_size=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_an_epoch_trains_each_token_at_most_once_and_drops_less_than_a_batch(lengths, length, batch_size, seed):
    num_tokens = sum(lengths) + len(lengths)
    if (num_tokens - 1) // length < batch_size:
        with pytest.raises(ValueError, match="make no batch"):
            batches_of(lengths, length, batch_size, seed, 1)
        return
    batches, _ = batches_of(lengths, length, batch_size, seed, 0)
    _, epoch = batches_of(lengths, length, batch_size, seed, batches.batches_per_epoch)
    targets = np.concatenate([targets.numpy().ravel() for _, targets in epoch])
    words, counts = np.unique(targets[targets != 0], return_counts=True)
    assert (counts == 1).all()
    assert len(targets) > num_tokens - 1 - length * (batch_size + 1)
    assert set(words) <= set(range(1, sum(lengths) + 1))


@given(start=st.integers(0, 12), seed=st.integers(0, 3))
def test_a_batch_depends_only_on_its_number(start, seed):
    _, all_batches = batches_of([30, 7, 22, 9], 6, 2, seed, 16)
    _, later = batches_of([30, 7, 22, 9], 6, 2, seed, 16 - start, start)
    for (ids_a, targets_a), (ids_b, targets_b) in zip(all_batches[start:], later, strict=True):
        assert ids_a.equal(ids_b)
        assert targets_a.equal(targets_b)


def test_targets_are_the_next_inputs():
    _, batches = batches_of([50, 30], 8, 2, 0, 6)
    for ids, targets in batches:
        assert ids[:, 1:].equal(targets[:, :-1])

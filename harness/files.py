"""Files that survive what happens to their writer."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def write_atomically(target: Path, text: str) -> None:
    """Replace ``target`` by ``text`` in UTF-8; on an error the old file stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        fresh = Path(folder) / target.name
        with fresh.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)


class Patient:
    """The text stream ``stream``, whose reader may leave: what cannot be written is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")

    def write(self, text: str) -> int:
        """Write ``text``, or nothing; its length."""
        try:
            return self.stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or nothing."""
        try:
            self.stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        # What is in the buffer would be written again, and fail again, when the interpreter ends.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` for this process; the kernel lets go when the process ends, however it does.

    Raises:
        BlockingIOError: another process holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield

"""Files that survive what happens to their writer."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(target: Path, text: str) -> None:
    """Replace ``target`` by ``text``; on an error the old file stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        fresh = Path(folder) / target.name
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` for this process; the kernel lets go when the process ends, however it does.

    Raises:
        BlockingIOError: another process holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield

"""Timed steps of several workers in turns: what slows the host for a second slows all of them.

The host of a rented machine is shared, and an eager step waits for it: medians of one row, ten
seconds apart, differ by 40 %. Workers that live at the same time and take a few steps each, one
after the other, see the same host. A worker that waits does nothing.

The state lies in a folder, so that it does not matter who has started whom: ``turn`` holds the
number of the worker whose turn it is; ``ready.N`` says that N has warmed up, ``gone.N`` that it
will take no turn any more. Who waits for a worker that is gone goes on with the next.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from forge.harness.files import write_atomically

# Steps of a turn. The first one finds caches that another worker has used, as each worker's does.
BURST = 4
# Timed steps of a row, as a multiple of what it would take alone: the point is to tell rows apart.
MORE_STEPS = 3
PAUSE_S = 0.0005


class Turns:
    """The place of worker ``index`` among ``count`` in ``folder``, which is empty at first."""

    def __init__(self, folder: Path | str, index: int, count: int) -> None:
        self.folder, self.index, self.count = Path(folder), index, count

    def as_json(self) -> dict[str, Any]:
        """The arguments."""
        return dict(folder=str(self.folder), index=self.index, count=self.count)

    def begin(self) -> None:
        """Wait until all workers have warmed up, or are gone."""
        (self.folder / f"ready.{self.index}").touch()
        while not all(self._is("ready", i) or self._is("gone", i) for i in range(self.count)):
            time.sleep(PAUSE_S)

    def take(self) -> None:
        """Wait for this worker's turn."""
        while self._whose() != self.index:
            time.sleep(PAUSE_S)

    def pass_on(self) -> None:
        """End this worker's turn."""
        write_atomically(self.folder / "turn", str((self.index + 1) % self.count))

    def leave(self) -> None:
        """Take no turn any more; a second time does nothing."""
        (self.folder / f"gone.{self.index}").touch()

    def _whose(self) -> int:
        try:
            turn = int((self.folder / "turn").read_text())
        except FileNotFoundError:
            turn = 0
        around = [(turn + i) % self.count for i in range(self.count)]
        return next((i for i in around if not self._is("gone", i)), turn)

    def _is(self, what: str, index: int) -> bool:
        return (self.folder / f"{what}.{index}").exists()

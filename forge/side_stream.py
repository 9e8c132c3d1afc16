"""Updates beside the backward pass of a captured step, on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Of factors that wait for an update: more of them delay the backward pass, not memory.
HELD_BYTES = 192 * 2**20


class SideStream:
    """Work that a CUDA graph may run at the same time as what follows it in the capturing stream.

    The allocator orders memory by the stream that it was allocated on, so tensors that the work
    reads are held until the capturing stream has been made to wait for the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._running: deque[tuple[torch.cuda.Event, Sequence[Tensor], int]] = deque()

    @contextmanager
    def beside(self, read: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, work goes to the side stream, after all that was launched before.

        Args:
            read: tensors of the current stream that the work reads and nobody else may keep.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        held = sum(t.nbytes for t in read)
        self._running.append((self._stream.record_event(), read, held))
        while sum(held for *_, held in self._running) > HELD_BYTES and len(self._running) > 1:
            event, *_ = self._running.popleft()
            current.wait_event(event)

    def join(self) -> None:
        """Let the current stream wait for all of it."""
        if self._running:
            torch.cuda.current_stream(self._stream.device).wait_event(self._running[-1][0])
            self._running.clear()

"""What an update kernel writes: a parameter with its states, and how a launch finds many of them.

A launch costs more host time than the update of a small layer takes on the GPU, so the update
kernels take up to ``CAPACITY`` parameters at once. Where their tensors lie, and their sizes, travel
as one small int64 array: the first programs of all entries, then the fields of each entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from forge.kernels.runtime import tl, triton

CAPACITY = 64
BLOCK = 128  # values of a row that share the scale of their 8-bit codes
_NEVER = 2**62


def rows_and_columns(t: Tensor) -> tuple[int, int]:
    """``t``, dense, as rows of memory: those of a contiguous matrix, otherwise one."""
    rows = t.shape[0] if t.dim() == 2 and t.is_contiguous() else 1
    return rows, t.numel() // rows if rows else 0


class Target:
    """A parameter and its optimizer states, all of one shape and memory layout.

    Args:
        param: bf16 or fp32, dense: its elements fill a contiguous range of memory.
        states: bf16 or fp32, one dtype for all, or int8 and uint8 codes; the shape and strides of
            ``param``.
        salt: the number of its first element, which every element's random bits depend on; within
            32 signed bits.
        scales: of codes, the exponents of each state's blocks, as in kernels/block_code.py.
    """

    __slots__ = (
        "param",
        "states",
        "scales",
        "salt",
        "address",
        "stride",
        "fields",
        "flat_bits",
        "matrix_bits",
        "dtypes",
        "parts",
    )

    def __init__(
        self, param: Tensor, states: Sequence[Tensor], salt: int, scales: Sequence[Tensor] = ()
    ) -> None:
        self.param = param
        self.states = tuple(states)
        self.scales = tuple(scales)
        self.salt = salt
        self.address, self.stride = param.data_ptr(), param.stride()
        rows, columns = rows_and_columns(param)
        addresses = (self.address, *(s.data_ptr() for s in states))
        # In the order that the kernels read them.
        self.fields = (
            *(salt, param.numel(), rows, columns),
            *addresses,
            *(s.data_ptr() for s in self.scales),
        )
        # All that must be aligned for wide accesses, or-ed: as a flat array, and as a matrix.
        self.flat_bits = reduce(or_, addresses, param.numel())
        self.matrix_bits = reduce(or_, addresses, rows | columns)
        self.dtypes = (param.dtype, states[0].dtype if states else None)
        self.parts: dict[tuple[int, int], Target] = {}

    def rows(self, first: int, last: int) -> Target:
        """The target of rows ``first`` to ``last`` of a contiguous matrix, made once.

        Its random bits are those that the whole draws there.
        """
        part = self.parts.get((first, last))
        if part is None:
            salt = self.salt + first * self.param.shape[1]
            part = self.parts[first, last] = Target(
                self.param[first:last],
                [s[first:last] for s in self.states],
                (salt + 2**31) % 2**32 - 2**31,
                [s[first:last] for s in self.scales],
            )
        return part


class Table:
    """Collects the entries of one launch."""

    def __init__(self) -> None:
        self.programs = 0
        self.firsts: list[int] = []
        self.entries: list[int] = []
        self.bits = 0

    def add(self, programs: int, fields: tuple[int, ...], bits: int) -> None:
        """Add an entry for ``programs`` programs; ``bits`` ors all that is to be aligned."""
        self.firsts.append(self.programs)
        self.programs += programs
        self.entries += fields
        self.bits |= bits

    @property
    def alignment(self) -> int:
        """16 when all that should be aligned is a multiple of 16, else 1.

        The compiler emits 16-byte accesses only where it knows that they are possible.
        """
        return 1 if self.bits & 15 else 16

    def to(self, device: torch.device) -> Tensor:
        """The int64 array on ``device``, copied without synchronising."""
        values = (*self.firsts, *([_NEVER] * (CAPACITY - len(self.firsts))), *self.entries)
        if device.type != "cuda":
            return torch.tensor(values, dtype=torch.int64, device="cpu")
        if torch.cuda.is_current_stream_capturing():
            if CapturedTables._active is None:
                raise NotImplementedError(
                    "an update inside a CUDA graph: a replay would read this launch's table after "
                    "it is gone; capture the step with forge.TrainStep"
                )
            return CapturedTables._active.add(values)
        return _on_gpu(values, device, torch._C._cuda_getCurrentRawStream(device.index))


class CapturedTables:
    """Where the tables of launches go that a CUDA graph captures: one array that outlives it.

    Nothing runs during a capture, so the tables are written afterwards, once, by :meth:`fill`. They
    do not lie in the graph's own memory, where a replay would overwrite them with what lay there
    before.

    Args:
        device: of the launches.
        entries: int64 numbers that fit in.
    """

    _active: CapturedTables | None = None

    def __init__(self, device: torch.device, entries: int = 2**19) -> None:
        self.memory = torch.zeros(entries, dtype=torch.int64, device=device)
        self.values: list[int] = []
        self.filled = 0

    def add(self, values: tuple[int, ...]) -> Tensor:
        start = len(self.values)
        # Each from an address that is a multiple of 16 bytes, as the kernels are compiled for.
        self.values += (*values, *([0] * (len(values) % 2)))
        if len(self.values) > self.memory.numel():
            del self.values[start:]
            raise RuntimeError(
                f"the launch tables of the captured steps exceed {self.memory.nbytes >> 20} MiB: "
                "capture fewer shapes, or use graph=False"
            )
        return self.memory[start : start + len(values)]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside the block, captured launches put their tables here."""
        CapturedTables._active, before = self, CapturedTables._active
        try:
            yield
        finally:
            CapturedTables._active = before

    def fill(self) -> None:
        """Write the tables added since the last time."""
        new = torch.tensor(self.values[self.filled :], dtype=torch.int64, device="cpu")
        self.memory[self.filled : len(self.values)].copy_(new)
        self.filled = len(self.values)


@lru_cache(maxsize=256)
def _on_gpu(values: tuple[int, ...], device: torch.device, _stream: int) -> Tensor:
    """Steps repeat themselves: the allocator hands out the same addresses, the table is there.

    By stream, because the copy is only ordered before what follows on the same one.
    """
    # A fresh pinned buffer each time: the copy is asynchronous, an old one may be in flight.
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


@triton.jit
def find_entry(table_ptr, CAPACITY: tl.constexpr):
    """The entry this program works on, and its index among that entry's programs."""
    pid = tl.program_id(0)
    firsts = tl.load(table_ptr + tl.arange(0, CAPACITY))
    started = firsts <= pid
    entry = tl.sum(started.to(tl.int32), axis=0) - 1
    first = tl.max(tl.where(started, firsts, 0), axis=0)
    return entry, (pid - first).to(tl.int32)


@triton.jit
def field(entry_ptr, j: tl.constexpr, MULTIPLE: tl.constexpr):
    """Field ``j`` of an entry, known to be a multiple of MULTIPLE."""
    # The hint belongs on the load itself: on the result of a call it is lost by inlining.
    return tl.multiple_of(tl.load(entry_ptr + j), MULTIPLE)


@triton.jit
def pointer(like_ptr, entry_ptr, j: tl.constexpr, ALIGN: tl.constexpr):
    """The address in field ``j`` as a pointer of ``like_ptr``'s type.

    Formed as an offset from the typed argument: the compiler drops what it knows of alignment where
    an integer becomes a pointer.
    """
    itemsize: tl.constexpr = like_ptr.dtype.element_ty.primitive_bitwidth // 8
    multiple: tl.constexpr = ALIGN // itemsize if ALIGN > itemsize else 1
    # Multiplied out, not hinted: a hint on a division by 1 is lost with the division.
    offset = (tl.load(entry_ptr + j) - like_ptr.to(tl.int64)) // (itemsize * multiple)
    return like_ptr + offset * multiple

"""Pointer tables: one launch over many tensors of different shapes.

A launch costs more host time than the update of a small layer takes on the GPU, so the update kernels
take up to ``CAPACITY`` parameters at once. Their positions and sizes travel as one small int64 array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from forge.kernels.runtime import tl, triton

CAPACITY = 64
_NEVER = 2**62

T = TypeVar("T")


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """``items`` in slices that fit one table."""
    for start in range(0, len(items), CAPACITY):
        yield items[start : start + CAPACITY]


def pointer_table(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, int]:
    """Table for :func:`find_entry` and the number of programs to launch.

    Args:
        rows: for each entry, how many programs it needs, then its fields (sizes, offsets).
        device: where the kernel runs.

    Returns:
        int64 [1 + fields, CAPACITY] on ``device``: row 0 holds each entry's first program, row ``j``
        field ``j`` of every entry; and the sum of the programs.
    """
    firsts, programs = [], 0
    for row in rows:
        firsts.append(programs)
        programs += row[0]
    columns = [firsts, *([row[j] for row in rows] for j in range(1, len(rows[0])))]
    padding = [_NEVER] * (CAPACITY - len(rows))
    # A fresh pinned buffer each time: the copy is asynchronous, a reused one could be in flight.
    table = torch.tensor(
        [column + padding for column in columns],
        dtype=torch.int64,
        pin_memory=device.type == "cuda",
    )
    return table.to(device, non_blocking=True), programs


def alignment(rows: Sequence[Sequence[int]], fields: slice) -> int:
    """16 when all these fields of every row are multiples of 16, else 1.

    Accesses of 16 bytes need it: the compiler emits them only where it knows that offsets, pitches
    and row lengths (in elements) allow it.
    """
    return 1 if any(value & 15 for row in rows for value in row[fields]) else 16


def offset(tensor: Tensor, base: Tensor) -> int:
    """How many elements ``tensor`` lies behind ``base``, of the same dtype, in memory."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


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
def field(table_ptr, entry, j: tl.constexpr, MULTIPLE: tl.constexpr, CAPACITY: tl.constexpr):
    """Field ``j`` of ``entry``, known to be a multiple of MULTIPLE."""
    # The hint belongs on the load itself: on the result of a call it is lost by inlining.
    return tl.multiple_of(tl.load(table_ptr + j * CAPACITY + entry), MULTIPLE)


@triton.jit
def pointer(
    base_ptr, table_ptr, entry, j: tl.constexpr, ALIGN: tl.constexpr, CAPACITY: tl.constexpr
):
    """``base_ptr`` plus field ``j``, an offset in elements, a multiple of ALIGN elements.

    An offset from a typed argument, not an address: the compiler drops what it knows of alignment
    where an integer becomes a pointer.
    """
    return base_ptr + field(table_ptr, entry, j, ALIGN, CAPACITY)

"""Sums of matrices over their rows: the last step of weight gradients that programs sum in parts.

    out[c] = sum_p parts[p, c]                  fp32, always in the same order

Shapes: parts [P, C] fp32, out [C]. One matrix a launch, or many: a model has several such weights
a layer, and a launch for each costs more than its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forge.kernels.runtime import (
    begin,
    early_launch,
    on_device,
    runs_triton,
    tl,
    triton,
)
from forge.kernels.target import CAPACITY, Table, field, find_entry, pointer

# Takes parts [P, C] whose rows add up to a weight's gradient; False: it must be formed.
Collect = Callable[[Tensor], bool]

_TILE = dict(ROWS=128, BLOCK=16, num_warps=4)


@triton.jit
def _sum_columns(
    parts_ptr, out_ptr, program, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    c = program * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        mask = (start + r < rows)[:, None] & (c < columns)[None, :]
        index = (start + r)[:, None] * columns + c[None, :]
        total += tl.load(parts_ptr + index, mask, other=0.0)
    tl.store(out_ptr + c, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), c < columns)


@triton.jit(do_not_specialize=["first", "rows"])
def _column_sum_kernel(
    parts_ptr,
    out_ptr,
    first,
    rows,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    second = tl.program_id(1)
    parts_ptr += second * first * C
    out_ptr += second * C
    count = tl.where(second == 0, first, rows - first)
    _sum_columns(parts_ptr, out_ptr, tl.program_id(0), count, C, ROWS, BLOCK)


@triton.jit
def _column_sums_kernel(
    table_ptr,  # entries: address of the parts, number of rows and of columns, offset in out
    out_ptr,
    ALIGN: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    entry, program = find_entry(table_ptr, CAPACITY)
    entry_ptr = table_ptr + CAPACITY + entry * 4
    parts_ptr = pointer(out_ptr, entry_ptr, 0, ALIGN)
    rows = field(entry_ptr, 1, 1).to(tl.int32)
    columns = field(entry_ptr, 2, ALIGN).to(tl.int32)
    out_ptr += field(entry_ptr, 3, ALIGN)
    _sum_columns(parts_ptr, out_ptr, program, rows, columns, ROWS, BLOCK)


def column_sum(parts: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """The sum [1, C] over the rows of ``parts`` (fp32, contiguous), in ``dtype``.

    With ``first``, [2, C]: the sum of so many rows, and that of the others.

    Launches Triton: for kernels that have left partial sums.
    """
    rows, columns = parts.shape
    sums = 1 if first is None else 2
    out = torch.empty((sums, columns), dtype=dtype, device=parts.device)
    with on_device(parts):
        _column_sum_kernel[(-(-columns // _TILE["BLOCK"]), sums)](
            parts,
            out,
            rows if first is None else first,
            rows,
            C=columns,
            **_TILE,
            **early_launch(parts),
        )
    return out


def column_sums(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The fp32 sums over the rows of each of ``matrices`` (fp32, contiguous, of one device)."""
    if not runs_triton(matrices[0]):
        return [parts.sum(0) for parts in matrices]
    sizes = [parts.shape[1] for parts in matrices]
    out = torch.empty(sum(sizes), dtype=torch.float32, device=matrices[0].device)
    outs = out.split(sizes)
    for start in range(0, len(matrices), CAPACITY):
        table = Table()
        chunk = slice(start, start + CAPACITY)
        for parts, result in zip(matrices[chunk], outs[chunk], strict=True):
            rows, columns = parts.shape
            address, offset = parts.data_ptr(), result.storage_offset()
            programs = -(-columns // _TILE["BLOCK"])
            table.add(programs, (address, rows, columns, offset), address | columns | offset)
        with on_device(out):
            _column_sums_kernel[(table.programs,)](
                table.to(out.device),
                out,
                ALIGN=table.alignment,
                CAPACITY=CAPACITY,
                **_TILE,
                **early_launch(out),
            )
    return list(outs)

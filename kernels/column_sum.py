"""Sum of a matrix over its rows: the last step of weight gradients that programs sum in parts.

    out[c] = sum_p partials[p, c]                  fp32, always in the same order

Shapes: partials [P, C] fp32, out [C].
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.runtime import on_device, tl, triton


@triton.jit(do_not_specialize=["rows"])
def _column_sum_kernel(
    partials_ptr, out_ptr, rows, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        mask = (start + r < rows)[:, None] & (c < C)[None, :]
        total += tl.load(partials_ptr + (start + r)[:, None] * C + c[None, :], mask, other=0.0)
    tl.store(out_ptr + c, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), c < C)


def column_sum(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the rows of ``partials`` (fp32, contiguous), in ``dtype``.

    Launches Triton: for kernels that have left partial sums.
    """
    rows, columns = partials.shape
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    block = 16
    with on_device(partials):
        _column_sum_kernel[(-(-columns // block),)](
            partials, out, rows, C=columns, ROWS=128, BLOCK=block, num_warps=4
        )
    return out

"""cos and sin of each token's rotary embedding, as the models' own module gives them.

    angle = position * inv_freq
    cos = scaling * cos([angle, angle]),    sin = scaling * sin([angle, angle])

Shapes: positions [B, T]; inv_freq fp32 [D/2]; cos and sin [B, T, D], in which both halves are the
same (Su et al., arXiv 2104.09864). The angle is one fp32 product, as in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.runtime import (
    begin,
    early_launch,
    on_device,
    power_of_2,
    runs_triton,
    tl,
    triton,
)

# Tokens of a program: one angle a thread at D = 128. Sines take time, not the few bytes written.
_ROWS = 2


def rope_tables_reference(
    inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, scaling: float
) -> tuple[Tensor, Tensor]:
    """In plain torch."""
    angle = positions[..., None].float() * inv_freq.float()
    angle = torch.cat((angle, angle), dim=-1)
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


@triton.jit
def _store_halves(ptr, index, x, HALF: tl.constexpr, mask):
    x = x.to(ptr.dtype.element_ty)
    tl.store(ptr + index, x, mask)
    tl.store(ptr + index + HALF, x, mask)


@triton.jit(do_not_specialize=["rows", "T"])
def _rope_tables_kernel(
    positions_ptr,  # [rows]; with COUNT written: the place of each token in its sequence
    inv_freq_ptr,
    cos_ptr,  # [rows, 2 * HALF]
    sin_ptr,
    rows,
    T,
    scaling,
    HALF: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    if COUNT:
        position = r % T
        tl.store(positions_ptr + r, position.to(positions_ptr.dtype.element_ty), r < rows)
    else:
        position = tl.load(positions_ptr + r, r < rows, other=0)
    mask = (r < rows)[:, None] & (c < HALF)
    frequency = tl.load(inv_freq_ptr + c, c < HALF, other=0.0).to(tl.float32)
    angle = position.to(tl.float32)[:, None] * frequency
    index = r.to(tl.int64)[:, None] * (2 * HALF) + c
    _store_halves(cos_ptr, index, tl.cos(angle) * scaling, HALF, mask)
    _store_halves(sin_ptr, index, tl.sin(angle) * scaling, HALF, mask)


def _launch(
    inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, scaling: float, count: bool
) -> tuple[Tensor, Tensor]:
    half = inv_freq.shape[0]
    cos, sin = (
        torch.empty((*positions.shape, 2 * half), dtype=dtype, device=positions.device)
        for _ in range(2)
    )
    rows = positions.numel()
    if rows:
        with on_device(cos):
            _rope_tables_kernel[(-(-rows // _ROWS),)](
                positions.reshape(-1),
                inv_freq.contiguous(),
                cos,
                sin,
                rows,
                positions.shape[-1],
                scaling,
                HALF=half,
                COUNT=count,
                ROWS=_ROWS,
                BLOCK=power_of_2(half),
                num_warps=4,
                **early_launch(cos),
            )
    return cos, sin


def rope_tables(
    inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``(cos, sin)`` [B, T, D] in ``dtype`` at these positions. No gradient.

    Args:
        inv_freq: [D/2], a float dtype; angles are fp32.
        positions: [B, T], integers, on the device of ``inv_freq``.
        scaling: of both results, before they are rounded.
    """
    if not runs_triton(positions):
        return rope_tables_reference(inv_freq, positions, dtype, scaling)
    return _launch(inv_freq, positions, dtype, scaling, count=False)


def counted_rope_tables(
    inv_freq: Tensor, tokens: int, dtype: torch.dtype, scaling: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``(positions, cos, sin)`` of tokens 0 to ``tokens``, in one kernel.

    ``positions`` is int64 [1, T]; the rest as :func:`rope_tables` gives it.
    """
    if not runs_triton(inv_freq):
        positions = torch.arange(tokens, device=inv_freq.device)[None]
        return positions, *rope_tables_reference(inv_freq, positions, dtype, scaling)
    positions = torch.empty((1, tokens), dtype=torch.int64, device=inv_freq.device)
    return positions, *_launch(inv_freq, positions, dtype, scaling, count=True)

"""RMSNorm, alone or behind the addition of a residual.

    h = x + residual                      (h = x without one)
    y = w * h / sqrt(mean(h^2) + eps)     the mean over the last dimension

and backward, with n = h / sqrt(mean(h^2) + eps), g = w * dy, and dh what else arrives at h:

    dx = dresidual = (g - n * mean(g * n)) / sqrt(mean(h^2) + eps) + dh
    dw = sum over tokens of dy * n

Shapes: x, residual, h, y [..., C]; w [C] (Zhang and Sennrich, arXiv 1910.07467). fp32 inside. The
norm reads h as it is stored, and backward computes the root again: that is cheaper than a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.column_sum import Collect, column_sum
from forge.kernels.runtime import (
    as_rows,
    begin,
    early_launch,
    on_device,
    power_of_2,
    processors,
    runs_triton,
    tl,
    triton,
)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``(y, h)`` in plain torch; differentiable."""
    h = x
    if residual is not None:
        h = (_wide(x) + _wide(residual)).to(torch.promote_types(x.dtype, residual.dtype))
    wide = _wide(h)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight)
    return y.to(torch.promote_types(h.dtype, weight.dtype)), h


def _wide(t: Tensor) -> Tensor:
    """At least fp32: in fp64 the reference is the truth that tests compare with."""
    return t if t.dtype == torch.float64 else t.float()


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    h_ptr,
    rows,
    x_pitch,
    residual_pitch,
    eps,
    C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    mask = (r < rows)[:, None] & (c < C)
    r = r.to(tl.int64)[:, None]
    h = tl.load(x_ptr + r * x_pitch + c, mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        h += tl.load(residual_ptr + r * residual_pitch + c, mask, other=0.0).to(tl.float32)
        stored = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + r * C + c, stored, mask)
        h = stored.to(tl.float32)
    w = tl.load(w_ptr + c, c < C, other=0.0).to(tl.float32)
    y = h * tl.rsqrt(tl.sum(h * h, axis=1) / C + eps)[:, None] * w
    tl.store(y_ptr + r * C + c, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_bwd_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    w_ptr,
    dx_ptr,
    parts_ptr,  # fp32 [programs, C]
    rows,
    dy_pitch,
    dh_pitch,
    h_pitch,
    eps,
    C: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + c, c < C, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(pid * ROWS, rows, tl.num_programs(0) * ROWS):
        r = first + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & (c < C)
        r = r.to(tl.int64)[:, None]
        h = tl.load(h_ptr + r * h_pitch + c, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + r * dy_pitch + c, mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(h * h, axis=1) / C + eps)[:, None]
        n = h * rstd
        g = dy * w
        dx = (g - n * (tl.sum(g * n, axis=1) / C)[:, None]) * rstd
        if DH:
            dx += tl.load(dh_ptr + r * dh_pitch + c, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + r * C + c, dx.to(dx_ptr.dtype.element_ty), mask)
        if DW:
            dw += dy * n
    if DW:
        tl.store(parts_ptr + pid * C + c, tl.sum(dw, axis=0)[None, :], c < C)


def _tile(columns: int, elements: int = 2048) -> dict[str, int]:
    """Whole rows, at least ``elements``: 16 a thread, 256 programs for 512 rows of 1,024."""
    block = power_of_2(columns)
    rows = max(1, elements // block)
    return dict(ROWS=rows, BLOCK=block, num_warps=min(16, max(4, rows * block // 512)))


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(y, h)`` by the kernel; ``h`` is ``x`` when there is no residual."""
    shape, rows = x.shape, as_rows(x)
    other, h_dtype = rows, x.dtype
    if residual is not None:
        other, h_dtype = as_rows(residual), torch.promote_types(x.dtype, residual.dtype)
    y_dtype = torch.promote_types(h_dtype, weight.dtype)
    y = torch.empty(shape, dtype=y_dtype, device=x.device)
    h = torch.empty(shape, dtype=h_dtype, device=x.device) if residual is not None else x
    tile = _tile(shape[-1])
    with on_device(x):
        _rms_norm_fwd_kernel[(max(1, -(-rows.shape[0] // tile["ROWS"])),)](
            rows,
            other,
            weight.contiguous(),
            y,
            h,
            rows.shape[0],
            rows.stride(0),
            other.stride(0),
            eps,
            C=shape[-1],
            RESIDUAL=residual is not None,
            **tile,
            **early_launch(x),
        )
    return y, h


def rms_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, eps: float, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """``dx`` in the dtype of ``h``, and fp32 [P, C] whose rows add up to ``dw``, by the kernel."""
    rows, dys = as_rows(h), as_rows(dy)
    dhs = as_rows(dh) if dh is not None else dys
    columns = h.shape[-1]
    # Two programs a multiprocessor hide each other's loads. Where there are rows for them, twice
    # forward's: rows of a tile are loaded together.
    most = 2 * processors(h)
    tile = _tile(columns, 4096 if rows.numel() >= 4096 * most else 2048)
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    programs = max(1, min(-(-rows.shape[0] // tile["ROWS"]), most))
    parts = None
    if need_weight:
        parts = torch.empty((programs, columns), dtype=torch.float32, device=h.device)
    with on_device(h):
        _rms_norm_bwd_kernel[(programs,)](
            dys,
            dhs,
            rows,
            weight.contiguous(),
            dx,
            dx if parts is None else parts,
            rows.shape[0],
            dys.stride(0),
            dhs.stride(0),
            rows.stride(0),
            eps,
            C=columns,
            DH=dh is not None,
            DW=need_weight,
            **tile,
            **early_launch(h),
        )
    return dx, parts


class RMSNormFunction(torch.autograd.Function):
    """``(y, h)`` of ``x`` and a residual, or ``y`` alone without one."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, collect: Collect | None
    ):
        y, h = rms_norm_forward(x, weight, eps, residual)
        ctx.save_for_backward(h, weight)
        ctx.eps, ctx.collect = eps, collect
        ctx.dtypes = (x.dtype, residual.dtype if residual is not None else None)
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dh: Tensor | None = None):
        h, weight = ctx.saved_tensors
        dx, dw = dh, None
        if dy is not None:
            dx, parts = rms_norm_backward(dy, dh, h, weight, ctx.eps, ctx.needs_input_grad[1])
            if parts is not None and (ctx.collect is None or not ctx.collect(parts)):
                (dw,) = column_sum(parts, weight.dtype)
        if dx is None:
            return None, None, None, None, None
        x_dtype, residual_dtype = ctx.dtypes
        dresidual = dx.to(residual_dtype) if residual_dtype is not None else None
        return dx.to(x_dtype), dw, None, dresidual, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, collect: Collect | None = None
) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)``, as ``torch.nn.functional.rms_norm``.

    Args:
        x: [..., C], any float dtype and strides.
        weight: [C].
        eps: added to the mean.
        collect: given parts, fp32 [P, C], whose rows add up to the weight's gradient, during
            backward, may take them and return True: then no gradient is formed. On a GPU.

    Returns:
        [..., C] in the promoted dtype of ``x`` and ``weight``.

    Raises:
        ValueError: ``weight`` does not have the length of a row.
    """
    _check_weight(x, weight)
    if not runs_triton(x):
        return rms_norm_reference(x, weight, eps)[0]
    return RMSNormFunction.apply(x, weight, eps, None, collect)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    collect: Collect | None = None,
) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` and its RMSNorm, in one kernel each way.

    Args:
        x: [..., C], any float dtype and strides.
        residual: the shape of ``x``.
        weight: [C].
        eps: added to the mean.
        collect: as in :func:`rms_norm`.

    Returns:
        ``(y, h)``, both [..., C]: the normalised sum, and the sum itself.

    Raises:
        ValueError: ``residual`` or ``weight`` has another shape.
    """
    _check_weight(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual: {tuple(residual.shape)} must be x's {tuple(x.shape)}")
    if not runs_triton(x):
        return rms_norm_reference(x, weight, eps, residual)
    return RMSNormFunction.apply(x, weight, eps, residual, collect)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight: {tuple(weight.shape)} must be [{x.shape[-1]}], a row of x")

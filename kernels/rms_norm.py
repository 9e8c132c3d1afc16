"""RMSNorm, alone or behind the addition of a residual.

    h = x + residual                      (h = x without one)
    y = w * h / sqrt(mean(h^2) + eps)     the mean over the last dimension

and backward, with n = h / sqrt(mean(h^2) + eps), g = w * dy, and dh what else arrives at h:

    dx = dresidual = (g - n * mean(g * n)) / sqrt(mean(h^2) + eps) + dh
    dw = sum over tokens of dy * n

Shapes: x, residual, h, y [..., C]; w [C] (Zhang and Sennrich, arXiv 1910.07467). fp32 inside. The
norm reads h as it is stored, and backward computes the root again: that is cheaper than a tensor.
It can write y once more as it goes, see :class:`NormAgain`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.column_sum import Collect, column_sum
from forge.kernels.linear_auto import parts_of
from forge.kernels.runtime import (
    as_rows,
    begin,
    early_launch,
    on_device,
    power_of_2,
    processors,
    runs_triton,
    saved_tensors,
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
    part_pitch,
    eps,
    C: tl.constexpr,
    PARTS: tl.constexpr,
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
    for p in tl.static_range(1, PARTS):
        h += tl.load(x_ptr + p * part_pitch + r * x_pitch + c, mask, other=0.0).to(tl.float32)
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
    y_ptr,
    parts_ptr,  # fp32 [programs, C]
    rows,
    dy_pitch,
    dh_pitch,
    h_pitch,
    part_pitch,
    eps,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    Y: tl.constexpr,
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
        for p in tl.static_range(1, PARTS):
            dy += tl.load(dy_ptr + p * part_pitch + r * dy_pitch + c, mask, other=0.0)
        rstd = tl.rsqrt(tl.sum(h * h, axis=1) / C + eps)[:, None]
        n = h * rstd
        g = dy * w
        dx = (g - n * (tl.sum(g * n, axis=1) / C)[:, None]) * rstd
        if DH:
            dx += tl.load(dh_ptr + r * dh_pitch + c, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + r * C + c, dx.to(dx_ptr.dtype.element_ty), mask)
        if Y:
            tl.store(y_ptr + r * C + c, (n * w).to(y_ptr.dtype.element_ty), mask)
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
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``(y, h)`` by the kernel; ``h`` is ``x`` when there is no residual. ``y`` may be given.

    With a residual ``x`` may stand for the sum of parts.
    """
    shape, rows, parts = x.shape, as_rows(x), parts_of(x)
    assert parts is None or residual is not None
    other, h_dtype = rows, x.dtype
    if residual is not None:
        other, h_dtype = as_rows(residual), torch.promote_types(x.dtype, residual.dtype)
    y_dtype = torch.promote_types(h_dtype, weight.dtype)
    if y is None:
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
            parts.stride(0) if parts is not None else 0,
            eps,
            C=shape[-1],
            PARTS=len(parts) if parts is not None else 1,
            RESIDUAL=residual is not None,
            **tile,
            **early_launch(x),
        )
    return y, h


def rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    eps: float,
    need_weight: bool,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``dx`` in the dtype of ``h``, and fp32 [P, C] whose rows add up to ``dw``, by the kernel.

    ``dy`` may stand for the sum of parts. ``y``, contiguous, receives the forward pass's result
    again.
    """
    rows, dys, terms = as_rows(h), as_rows(dy), parts_of(dy)
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
            dx if y is None else y,
            dx if parts is None else parts,
            rows.shape[0],
            dys.stride(0),
            dhs.stride(0),
            rows.stride(0),
            terms.stride(0) if terms is not None else 0,
            eps,
            C=columns,
            PARTS=len(terms) if terms is not None else 1,
            DH=dh is not None,
            DW=need_weight,
            Y=y is not None,
            **tile,
            **early_launch(h),
        )
    return dx, parts


class NormAgain:
    """Makes ``y`` once more during the backward pass, for a layer that did not keep its input.

    The layer's backward asks for a :meth:`buffer`. The norm's, which comes next, fills it on its
    way; whoever needs it earlier, or where the norm has no backward, calls :meth:`fill`.
    """

    h: Tensor | None = None
    empty: Tensor | None = None

    @staticmethod
    def of(y: Tensor) -> NormAgain | None:
        """How to make ``y`` again, where it is what a norm of this file returned.

        None if it was written to since, and while a hook on saved tensors (a checkpoint's) is to
        decide what is kept.
        """
        found = getattr(y, "_forge_norm_again", None)
        if found is None or y._version != found.y_version:
            return None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return found if hooks is None else None

    @staticmethod
    def unfilled(y: Tensor) -> NormAgain | None:
        """Who is to fill ``y``, where it is a buffer that the norm's backward has yet to fill."""
        # Not its dict, which would have to be made for every tensor.
        found = getattr(y, "_forge_norm_again", None)
        return found if found is not None and found.empty is y else None

    def remember(self, y: Tensor, h: Tensor, weight: Tensor, eps: float) -> None:
        """``y`` is the norm of ``h``."""
        # Detached: with its graph, h would hold the node that holds this.
        self.h, self.weight, self.eps = h.detach(), weight.detach(), eps
        self.versions, self.y_version, self.dtype = _versions(h, weight), y._version, y.dtype

    def buffer(self) -> Tensor:
        """``y`` [..., C], to be filled; one for all layers that ask before it is.

        Raises:
            RuntimeError: the graph was differentiated, and not kept.
        """
        if self.empty is None:
            if self.h is None:
                raise RuntimeError(
                    "a second backward through a graph that the first one has freed: "
                    "use retain_graph=True in the first"
                )
            self.empty = torch.empty(self.h.shape, dtype=self.dtype, device=self.h.device)
            self.empty._forge_norm_again = self  # type: ignore[attr-defined]
        return self.empty

    def fill(self) -> None:
        """Write to the buffer, if nobody has yet.

        Raises:
            RuntimeError: the input of the norm, or its weight, was changed in place.
        """
        if self.empty is None:
            return
        assert self.h is not None
        if _versions(self.h, self.weight) != self.versions:
            raise RuntimeError(
                "the input or the weight of a norm was changed in place after its forward pass; "
                "the weight gradient of the layer behind it needs what they were"
            )
        rms_norm_forward(self.h, self.weight, self.eps, None, self.empty)
        self.empty = None


def _versions(*tensors: Tensor) -> list[int]:
    return [t._version for t in tensors]


class RMSNormFunction(torch.autograd.Function):
    """``(y, h)`` of ``x`` and a residual, or ``y`` alone without one."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        collect: Collect | None,
        again: NormAgain,
    ):
        y, h = rms_norm_forward(x, weight, eps, residual)
        again.remember(y, h, weight, eps)
        ctx.save_for_backward(h, weight)
        ctx.eps, ctx.collect, ctx.again = eps, collect, again
        ctx.dtypes = (x.dtype, residual.dtype if residual is not None else None)
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dh: Tensor | None = None):
        h, weight = saved_tensors(ctx)
        dx, dw, again = dh, None, ctx.again
        if dy is not None:
            need_weight = ctx.needs_input_grad[1]
            dx, parts = rms_norm_backward(dy, dh, h, weight, ctx.eps, need_weight, again.empty)
            again.empty = None
            if parts is not None and (ctx.collect is None or not ctx.collect(parts)):
                (dw,) = column_sum(parts, weight.dtype)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            again.h = None  # as autograd frees what it has saved
        if dx is None:
            return None, None, None, None, None, None
        x_dtype, residual_dtype = ctx.dtypes
        dresidual = dx.to(residual_dtype) if residual_dtype is not None else None
        return dx.to(x_dtype), dw, None, dresidual, None, None


def _apply(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, collect: Collect | None):
    again = NormAgain()
    found = RMSNormFunction.apply(x, weight, eps, residual, collect, again)
    if torch.is_grad_enabled():
        y = found if residual is None else found[0]
        y._forge_norm_again = again
    return found


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
    return _apply(x, weight, eps, None, collect)


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
    return _apply(x, weight, eps, residual, collect)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight: {tuple(weight.shape)} must be [{x.shape[-1]}], a row of x")

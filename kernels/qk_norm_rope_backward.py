"""Backward of qk_norm_rope.py, where formulas and shapes are, and what both directions share."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.runtime import (
    as_rows,
    begin,
    early_launch,
    on_device,
    power_of_2,
    processors,
    tl,
    triton,
)

HEADS = 8  # a program takes so many heads of a token at a time
# 64 registers a thread, so that a multiprocessor holds eight programs of 128 threads. That suffices
# for two tokens, with 16 bytes an access, if a program has one tile; if it has several, and carries
# the weight's gradient from one to the next, for one token and 8 bytes.
_PROGRAMS, _WARPS = 8, 4
# Up to so many programs for each that can run at once they have one tile each. More would leave the
# weights' gradients in more parts than are worth keeping.
_WAVES = 2


def batched(table: Tensor, batch: int) -> Tensor:
    """cos or sin as [B, T, D] whose last dimension is dense; a shared table is not copied."""
    table = table if table.stride(-1) == 1 else table.contiguous()
    return table.expand(batch, -1, -1)


def tile_of_heads(head_dim: int, warps: int) -> dict[str, int]:
    return dict(HEADS=HEADS, BLOCK=power_of_2(head_dim // 2), num_warps=warps)


@triton.jit
def load_rotation(cos_ptr, sin_ptr, c, mask, D: tl.constexpr):
    """cos and sin of the first half of a token's elements, then of the second."""
    cos_a = tl.load(cos_ptr + c, mask, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + c, mask, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + c + D // 2, mask, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + c + D // 2, mask, other=0.0).to(tl.float32)
    return cos_a, sin_a, cos_b, sin_b


@triton.jit
def _gradient(grad, b, t, h, c, mask, PARTS: tl.constexpr):
    """fp32: the sum of the parts of a gradient of [B, heads * PARTS, T, D].

    ``grad``: its address, then its strides by batch, head and token.
    """
    ptr = grad[0] + b * grad[1] + t * grad[3] + h.to(tl.int64) * (PARTS * grad[2]) + c
    total = tl.load(ptr, mask, other=0.0).to(tl.float32)
    for g in tl.static_range(1, PARTS):
        total += tl.load(ptr + g * grad[2], mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _rows_and_heads(first, T, FIRST, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Of each row of a tile [TOKENS * HEADS, D/2] its token, also as batch and place, and head."""
    r = tl.arange(0, TOKENS * HEADS)[:, None]
    row = first + r // HEADS
    # In 32 bits: a division in 64 takes a hundred instructions.
    b = row // T
    t = (row - b * T).to(tl.int64)
    return row, b.to(tl.int64), t, FIRST + r % HEADS


@triton.jit
def _copy_part(
    grad, target, T, rows, FIRST, COUNT: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads FIRST to FIRST + HEADS of the values' gradient, whose parts are summed, if anything."""
    c = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(0) * TOKENS, rows, tl.num_programs(0) * TOKENS):
        row, b, t, h = _rows_and_heads(first, T, FIRST, TOKENS, HEADS)
        mask = (row < rows) & (h < COUNT) & (c < D // 2)
        dv_a = _gradient(grad, b, t, h, c, mask, PARTS)
        dv_b = _gradient(grad, b, t, h, c + D // 2, mask, PARTS)
        ptr = target[0] + row.to(tl.int64) * target[1] + h * D + c
        tl.store(ptr, dv_a.to(ptr.dtype.element_ty), mask)
        tl.store(ptr + D // 2, dv_b.to(ptr.dtype.element_ty), mask)


@triton.jit
def _backward_tile(
    grad, x, dx, w_ptr, cos, sin, first, T, rows, eps, FIRST,
    COUNT: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the input's gradient of a tile; return that of the weight, [TOKENS * HEADS, D/2] * 2.

    Arguments as of :func:`_backward_part`.
    """
    c = tl.arange(0, BLOCK)[None, :]
    in_c = c < D // 2
    row, b, t, h = _rows_and_heads(first, T, FIRST, TOKENS, HEADS)
    in_rows = row < rows
    mask = in_rows & (h < COUNT) & in_c
    row = row.to(tl.int64)
    x_ptr = x[0] + row * x[1] + h * D + c
    x_a = tl.load(x_ptr, mask, other=0.0).to(tl.float32)
    x_b = tl.load(x_ptr + D // 2, mask, other=0.0).to(tl.float32)
    da = _gradient(grad, b, t, h, c, mask, PARTS)
    db = _gradient(grad, b, t, h, c + D // 2, mask, PARTS)
    cos_ptr = cos[0] + b * cos[1] + t * cos[2]
    sin_ptr = sin[0] + b * sin[1] + t * sin[2]
    cos_a, sin_a, cos_b, sin_b = load_rotation(cos_ptr, sin_ptr, c, in_rows & in_c, D)
    dp = da * cos_a + db * sin_b
    dq = db * cos_b - da * sin_a
    rstd = tl.rsqrt((tl.sum(x_a * x_a, axis=1) + tl.sum(x_b * x_b, axis=1)) / D + eps)[:, None]
    x_a *= rstd
    x_b *= rstd
    dw_a = dp * x_a
    dw_b = dq * x_b
    dp *= tl.load(w_ptr + c, in_c, other=0.0).to(tl.float32)
    dq *= tl.load(w_ptr + c + D // 2, in_c, other=0.0).to(tl.float32)
    mean = ((tl.sum(dp * x_a, axis=1) + tl.sum(dq * x_b, axis=1)) / D)[:, None]
    dx_ptr = dx[0] + row * dx[1] + h * D + c
    tl.store(dx_ptr, ((dp - x_a * mean) * rstd).to(dx_ptr.dtype.element_ty), mask)
    tl.store(dx_ptr + D // 2, ((dq - x_b * mean) * rstd).to(dx_ptr.dtype.element_ty), mask)
    return dw_a, dw_b


@triton.jit
def _backward_part(
    grad,  # of the output, as _gradient takes it
    x,  # the input, and its pitch
    dx,
    w_ptr,
    cos,  # the table, and its strides by batch and token
    sin,
    parts_ptr,  # of this program
    T,
    rows,
    eps,
    FIRST,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Heads FIRST to FIRST + HEADS of every so many tokens."""
    first = tl.program_id(0) * TOKENS
    dw_a, dw_b = _backward_tile(
        grad, x, dx, w_ptr, cos, sin, first, T, rows, eps, FIRST,
        COUNT, PARTS, D, TOKENS, HEADS, BLOCK,
    )  # fmt: skip
    if not ONCE:
        step = tl.num_programs(0) * TOKENS
        for other in range(first + step, rows, step):
            more_a, more_b = _backward_tile(
                grad, x, dx, w_ptr, cos, sin, other, T, rows, eps, FIRST,
                COUNT, PARTS, D, TOKENS, HEADS, BLOCK,
            )  # fmt: skip
            dw_a += more_a
            dw_b += more_b
    c = tl.arange(0, BLOCK)[None, :]
    tl.store(parts_ptr + c, tl.sum(dw_a, axis=0)[None, :], c < D // 2)
    tl.store(parts_ptr + c + D // 2, tl.sum(dw_b, axis=0)[None, :], c < D // 2)


@triton.jit(do_not_specialize=["T", "rows"])
def _qk_norm_rope_bwd_kernel(
    dq_ptr,  # gradients of the outputs, their strides by batch, head and token below
    dk_ptr,
    dv_ptr,
    q_in_ptr,
    k_in_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    dq_in_ptr,
    dk_in_ptr,
    dv_in_ptr,
    parts_ptr,  # fp32 [programs, D]: of the weight of q, then of k
    T,
    rows,
    dq_batch,
    dq_head,
    dq_token,
    dk_batch,
    dk_head,
    dk_token,
    dv_batch,
    dv_head,
    dv_token,
    q_pitch,
    k_pitch,
    dq_in_pitch,
    dk_in_pitch,
    dv_in_pitch,
    cos_batch,
    cos_pitch,
    sin_batch,
    sin_pitch,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # of the gradients of k and v, each [B, K * PARTS, T, D]
    D: tl.constexpr,
    VALUES: tl.constexpr,
    ONCE: tl.constexpr,  # a program has one tile
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    part = tl.program_id(1)
    parts_ptr += (part * tl.num_programs(0) + tl.program_id(0)) * D
    cos = (cos_ptr, cos_batch, cos_pitch)
    sin = (sin_ptr, sin_batch, sin_pitch)
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (K + HEADS - 1) // HEADS
    # No names in here: what two branches call the same must have one type.
    if part < q_parts:
        _backward_part(
            (dq_ptr, dq_batch, dq_head, dq_token), (q_in_ptr, q_pitch), (dq_in_ptr, dq_in_pitch),
            q_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, part * HEADS, H, 1, D, ONCE, TOKENS, HEADS, BLOCK,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        _backward_part(
            (dk_ptr, dk_batch, dk_head, dk_token), (k_in_ptr, k_pitch), (dk_in_ptr, dk_in_pitch),
            k_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, (part - q_parts) * HEADS, K, PARTS, D, ONCE, TOKENS, HEADS, BLOCK,
        )  # fmt: skip
    elif VALUES:
        _copy_part(
            (dv_ptr, dv_batch, dv_head, dv_token), (dv_in_ptr, dv_in_pitch),
            T, rows, (part - q_parts - kv_parts) * HEADS, K, PARTS, D, TOKENS, HEADS, BLOCK,
        )  # fmt: skip


def qk_norm_rope_backward(
    grads: tuple[Tensor, ...],
    inputs: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, ...],
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, int]:
    """Write the gradients of q and k, copy that of v, by one kernel.

    Args:
        grads: of the outputs q [B, H, T, D], k [B, K, T, D] and perhaps v [B, K, T, D]. Those of k
            and v may come in n parts, [B, K * n, T, D], those of a head side by side.
        inputs: q [B, T, H*D] and k [B, T, K*D].
        outputs: written: the gradients of q, k and perhaps v, [B, T, (H, K, K)*D], rows of any
            pitch.

    Returns:
        fp32 [P, D], and a number of rows: so many add up to the gradient of ``q_weight``, the
        others to that of ``k_weight``.
    """
    batch, heads, tokens, size = grads[0].shape
    grads = tuple(g if g.stride(-1) == 1 else g.contiguous() for g in grads)
    q_rows, k_rows = map(as_rows, inputs)
    written = tuple(map(as_rows, outputs))
    cos, sin = batched(cos, batch), batched(sin, batch)
    kv_heads = inputs[1].shape[-1] // size
    groups = [-(-n // HEADS) for n in (heads, kv_heads)]
    values = len(grads) == 3
    across = sum(groups) + values * groups[1]
    slots, rows = _PROGRAMS * processors(q_rows), batch * tokens
    once = -(-rows // 2) * across <= _WAVES * slots
    programs = max(1, -(-rows // 2) if once else min(rows, slots // across))
    counts = [programs * n for n in groups]
    parts = torch.empty((sum(counts), size), dtype=torch.float32, device=q_rows.device)
    triple = (*grads, grads[-1])[:3]
    targets = (*written, written[-1])[:3]
    with on_device(q_rows):
        _qk_norm_rope_bwd_kernel[(programs, across)](
            *triple,
            q_rows,
            k_rows,
            q_weight.contiguous(),
            k_weight.contiguous(),
            cos,
            sin,
            *targets,
            parts,
            max(1, tokens),
            rows,
            *(stride for g in triple for stride in g.stride()[:3]),
            q_rows.stride(0),
            k_rows.stride(0),
            *(target.stride(0) for target in targets),
            *cos.stride()[:2],
            *sin.stride()[:2],
            eps,
            H=heads,
            K=kv_heads,
            PARTS=grads[1].shape[1] // kv_heads,
            D=size,
            VALUES=values,
            ONCE=once,
            TOKENS=2 if once else 1,
            **tile_of_heads(size, _WARPS),
            **early_launch(q_rows),
        )
    return parts, counts[0]

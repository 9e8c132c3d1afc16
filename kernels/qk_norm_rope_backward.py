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
# 8 bytes an access. 16 take 136 registers a thread and leave room for 14 warps a multiprocessor;
# 8 take 56 and leave room for 36.
_WARPS = 4


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
def _gradient(grads, h, c, mask, PARTS: tl.constexpr):
    """fp32 [HEADS, D/2]: the sum of the parts of each head's gradient at ``c``.

    ``grads``: where the gradient of this token is, and the stride of its heads, of which PARTS
    neighbours belong to one of ``h``.
    """
    ptr = grads[0] + h.to(tl.int64) * (PARTS * grads[1]) + c
    total = tl.load(ptr, mask, other=0.0).to(tl.float32)
    for g in tl.static_range(1, PARTS):
        total += tl.load(ptr + g * grads[1], mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _backward_heads(
    grads, x_ptr, w_ptr, dx_ptr, rotation, dw, h, c, mask, eps,
    PARTS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the gradient of some heads; add that of the weight to the halves ``dw`` [HEADS, D/2].

    ``grads``: of the output, as _gradient takes it.
    """
    cos_a, sin_a, cos_b, sin_b = rotation
    index = h * D + c
    a = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + index + D // 2, mask, other=0.0).to(tl.float32)
    da = _gradient(grads, h, c, mask, PARTS)
    db = _gradient(grads, h, c + D // 2, mask, PARTS)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
    a *= rstd
    b *= rstd
    dp = da * cos_a + db * sin_b
    dq = db * cos_b - da * sin_a
    dw_a = dw[0] + dp * a
    dw_b = dw[1] + dq * b
    dp *= tl.load(w_ptr + c, c < D // 2, other=0.0).to(tl.float32)
    dq *= tl.load(w_ptr + c + D // 2, c < D // 2, other=0.0).to(tl.float32)
    mean = ((tl.sum(dp * a, axis=1) + tl.sum(dq * b, axis=1)) / D)[:, None]
    dx_type = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + index, ((dp - a * mean) * rstd).to(dx_type), mask)
    tl.store(dx_ptr + index + D // 2, ((dq - b * mean) * rstd).to(dx_type), mask)
    return dw_a, dw_b


@triton.jit
def _backward_part(
    grad,  # the gradient of the output, then its strides by batch, head and token
    x,  # the input, and its pitch
    dx,
    values,  # gradient and target of the values of these heads, as grad and dx; or empty
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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Heads FIRST to FIRST + HEADS of every so many tokens."""
    c = tl.arange(0, BLOCK)[None, :]
    h = FIRST + tl.arange(0, HEADS)[:, None]
    mask = (h < COUNT) & (c < D // 2)
    dw_a = tl.zeros((HEADS, BLOCK), dtype=tl.float32)
    dw_b = tl.zeros((HEADS, BLOCK), dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        # In 32 bits: a division in 64 takes a hundred instructions.
        b = row // T
        t = (row - b * T).to(tl.int64)
        b = b.to(tl.int64)
        row = tl.cast(row, tl.int64)
        if len(values) > 0:
            v, dv = values
            v_grads = (v[0] + b * v[1] + t * v[3], v[2])
            dv_ptr = dv[0] + row * dv[1] + h * D + c
            v_a = _gradient(v_grads, h, c, mask, PARTS).to(dv_ptr.dtype.element_ty)
            v_b = _gradient(v_grads, h, c + D // 2, mask, PARTS).to(dv_ptr.dtype.element_ty)
            tl.store(dv_ptr, v_a, mask)
            tl.store(dv_ptr + D // 2, v_b, mask)
        cos_ptr = cos[0] + b * cos[1] + t * cos[2]
        sin_ptr = sin[0] + b * sin[1] + t * sin[2]
        rotation = load_rotation(cos_ptr, sin_ptr, c, c < D // 2, D)
        grads = (grad[0] + b * grad[1] + t * grad[3], grad[2])
        x_ptr, dx_ptr = x[0] + row * x[1], dx[0] + row * dx[1]
        dw_a, dw_b = _backward_heads(
            grads, x_ptr, w_ptr, dx_ptr, rotation, (dw_a, dw_b), h, c, mask, eps, PARTS, D
        )
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
    # No names in here: what both branches call the same must have one type.
    if part < q_parts:
        _backward_part(
            (dq_ptr, dq_batch, dq_head, dq_token), (q_in_ptr, q_pitch), (dq_in_ptr, dq_in_pitch),
            (), q_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, part * HEADS, H, 1, D, HEADS, BLOCK,
        )  # fmt: skip
    elif VALUES:
        _backward_part(
            (dk_ptr, dk_batch, dk_head, dk_token), (k_in_ptr, k_pitch), (dk_in_ptr, dk_in_pitch),
            ((dv_ptr, dv_batch, dv_head, dv_token), (dv_in_ptr, dv_in_pitch)),
            k_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, (part - q_parts) * HEADS, K, PARTS, D, HEADS, BLOCK,
        )  # fmt: skip
    else:
        _backward_part(
            (dk_ptr, dk_batch, dk_head, dk_token), (k_in_ptr, k_pitch), (dk_in_ptr, dk_in_pitch),
            (), k_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, (part - q_parts) * HEADS, K, PARTS, D, HEADS, BLOCK,
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
    # Eight programs a multiprocessor, all of which run at once.
    programs = max(1, min(batch * tokens, 8 * processors(q_rows) // sum(groups)))
    counts = [programs * n for n in groups]
    parts = torch.empty((sum(counts), size), dtype=torch.float32, device=q_rows.device)
    triple = (*grads, grads[-1])[:3]
    targets = (*written, written[-1])[:3]
    with on_device(q_rows):
        _qk_norm_rope_bwd_kernel[(programs, sum(groups))](
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
            batch * tokens,
            *(stride for g in triple for stride in g.stride()[:3]),
            q_rows.stride(0),
            k_rows.stride(0),
            *(rows.stride(0) for rows in targets),
            *cos.stride()[:2],
            *sin.stride()[:2],
            eps,
            H=heads,
            K=kv_heads,
            PARTS=grads[1].shape[1] // kv_heads,
            D=size,
            VALUES=len(grads) == 3,
            **tile_of_heads(size, _WARPS),
            **early_launch(q_rows),
        )
    return parts, counts[0]

"""Queries and keys made ready for attention: RMSNorm of each head, then rotary embedding.

For each token and head, with x = (a, b) the two halves of its D elements:

    n = w * x / sqrt(mean(x^2) + eps) = (p, q)
    out = (p * cos_a - q * sin_a,  q * cos_b + p * sin_b)

and backward

    dn = (da * cos_a + db * sin_b,  db * cos_b - da * sin_a)
    dx = (w * dn - m * mean(w * dn * m)) / sqrt(mean(x^2) + eps),     m = x / sqrt(mean(x^2) + eps)
    dw = sum over tokens and heads of dn * m

Shapes: B batch, T tokens, H heads of queries, K of keys and of values, D head size (even). Input:
q [B, T, H*D] and k [B, T, K*D], or qkv [B, T, (H+2K)*D] in that order; cos and sin [1 or B, T, D];
weights [D]. Output: q [B, H, T, D], k and v [B, K, T, D]. (Qwen3 technical report, arXiv
2505.09388; Su et al., arXiv 2104.09864, in the layout of halves.) fp32 inside.

The output's memory is [B, T, H, D]: attention kernels follow the layout of their queries, so what
they return is ready for the next projection without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.column_sum import Collect, column_sum
from forge.kernels.rms_norm import rms_norm_reference
from forge.kernels.runtime import (
    as_rows,
    on_device,
    power_of_2,
    processors,
    runs_triton,
    tl,
    triton,
)

_HEADS = 8  # a program takes so many heads of a token at a time


def norm_rope_reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """One of q and k in plain torch, [B, T, H*D] to [B, H, T, D]; differentiable."""
    wide = x if x.dtype == torch.float64 else x.float()
    heads = wide.unflatten(-1, (-1, weight.shape[0])).transpose(1, 2)
    n, _ = rms_norm_reference(heads, weight, eps)
    a, b = n.chunk(2, dim=-1)
    cos, sin = cos.to(n.dtype).unsqueeze(1), sin.to(n.dtype).unsqueeze(1)
    out = n * cos + torch.cat((-b, a), dim=-1) * sin
    return out.to(torch.promote_types(x.dtype, weight.dtype))


@triton.jit
def _rotation(cos_ptr, sin_ptr, c, mask, D: tl.constexpr):
    """cos and sin of the first half of a token's elements, then of the second."""
    cos_a = tl.load(cos_ptr + c, mask, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + c, mask, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + c + D // 2, mask, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + c + D // 2, mask, other=0.0).to(tl.float32)
    return cos_a, sin_a, cos_b, sin_b


@triton.jit
def _forward_heads(x_ptr, w_ptr, out_ptr, rotation, h, c, mask, eps, D: tl.constexpr):
    cos_a, sin_a, cos_b, sin_b = rotation
    index = h * D + c
    a = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + index + D // 2, mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
    p = a * rstd * tl.load(w_ptr + c, c < D // 2, other=0.0).to(tl.float32)
    q = b * rstd * tl.load(w_ptr + c + D // 2, c < D // 2, other=0.0).to(tl.float32)
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptr + index, (p * cos_a - q * sin_a).to(out_type), mask)
    tl.store(out_ptr + index + D // 2, (q * cos_b + p * sin_b).to(out_type), mask)


@triton.jit(do_not_specialize=["T"])
def _qk_norm_rope_fwd_kernel(
    q_in_ptr,
    k_in_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    T,
    q_pitch,
    k_pitch,
    cos_batch,
    cos_pitch,
    sin_batch,
    sin_pitch,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) // T
    t = (tl.program_id(0) - b * T).to(tl.int64)
    b = b.to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = tl.arange(0, BLOCK)[None, :]
    cos_ptr += b * cos_batch + t * cos_pitch
    sin_ptr += b * sin_batch + t * sin_pitch
    rotation = _rotation(cos_ptr, sin_ptr, c, c < D // 2, D)
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < q_parts:
        h = part * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (h < H) & (c < D // 2)
        x_ptr, out_ptr = q_in_ptr + row * q_pitch, q_ptr + row * (H * D)
        _forward_heads(x_ptr, q_weight_ptr, out_ptr, rotation, h, c, mask, eps, D)
    else:
        h = (part - q_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (h < K) & (c < D // 2)
        x_ptr, out_ptr = k_in_ptr + row * k_pitch, k_ptr + row * (K * D)
        _forward_heads(x_ptr, k_weight_ptr, out_ptr, rotation, h, c, mask, eps, D)


@triton.jit
def _backward_heads(grads, x_ptr, w_ptr, dx_ptr, rotation, dw, h, c, mask, eps, D: tl.constexpr):
    """Write the gradient of some heads; add that of the weight to the halves ``dw`` [HEADS, D/2].

    ``grads``: where the output's gradient of this token is, and the stride of its heads.
    """
    cos_a, sin_a, cos_b, sin_b = rotation
    index = h * D + c
    a = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + index + D // 2, mask, other=0.0).to(tl.float32)
    dout_ptr = grads[0] + h.to(tl.int64) * grads[1] + c
    da = tl.load(dout_ptr, mask, other=0.0).to(tl.float32)
    db = tl.load(dout_ptr + D // 2, mask, other=0.0).to(tl.float32)
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
            v_ptr = v[0] + b * v[1] + t * v[3] + h.to(tl.int64) * v[2] + c
            dv_ptr = dv[0] + row * dv[1] + h * D + c
            v_a = tl.load(v_ptr, mask)
            v_b = tl.load(v_ptr + D // 2, mask)
            tl.store(dv_ptr, v_a, mask)
            tl.store(dv_ptr + D // 2, v_b, mask)
        cos_ptr = cos[0] + b * cos[1] + t * cos[2]
        sin_ptr = sin[0] + b * sin[1] + t * sin[2]
        rotation = _rotation(cos_ptr, sin_ptr, c, c < D // 2, D)
        grads = (grad[0] + b * grad[1] + t * grad[3], grad[2])
        x_ptr, dx_ptr = x[0] + row * x[1], dx[0] + row * dx[1]
        dw_a, dw_b = _backward_heads(
            grads, x_ptr, w_ptr, dx_ptr, rotation, (dw_a, dw_b), h, c, mask, eps, D
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
    D: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(1)
    parts_ptr += (part * tl.num_programs(0) + tl.program_id(0)) * D
    cos = (cos_ptr, cos_batch, cos_pitch)
    sin = (sin_ptr, sin_batch, sin_pitch)
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < q_parts:
        grad, x = (dq_ptr, dq_batch, dq_head, dq_token), (q_in_ptr, q_pitch)
        _backward_part(
            grad, x, (dq_in_ptr, dq_in_pitch), (), q_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, part * HEADS, H, D, HEADS, BLOCK,
        )  # fmt: skip
    else:
        grad, x = (dk_ptr, dk_batch, dk_head, dk_token), (k_in_ptr, k_pitch)
        values = ()
        if VALUES:
            values = ((dv_ptr, dv_batch, dv_head, dv_token), (dv_in_ptr, dv_in_pitch))
        _backward_part(
            grad, x, (dk_in_ptr, dk_in_pitch), values, k_weight_ptr, cos, sin, parts_ptr,
            T, rows, eps, (part - q_parts) * HEADS, K, D, HEADS, BLOCK,
        )  # fmt: skip


def _tile(head_dim: int, warps: int) -> dict[str, int]:
    return dict(HEADS=_HEADS, BLOCK=power_of_2(head_dim // 2), num_warps=warps)


# 16 bytes an access in forward. In backward that takes 136 registers a thread and leaves room for
# 14 warps a multiprocessor; 8 bytes take 56 and leave room for 36.
_FORWARD_WARPS, _BACKWARD_WARPS = 2, 4


def qk_norm_rope_forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Queries [B, H, T, D] and keys [B, K, T, D] by the kernel."""
    batch, tokens, _ = q.shape
    size = q_weight.shape[0]
    heads, kv_heads = q.shape[-1] // size, k.shape[-1] // size
    dtype = torch.promote_types(q.dtype, q_weight.dtype)
    q_out = torch.empty((batch, tokens, heads, size), dtype=dtype, device=q.device)
    k_out = torch.empty((batch, tokens, kv_heads, size), dtype=dtype, device=q.device)
    q_rows, k_rows = as_rows(q), as_rows(k)
    cos, sin = _batched(cos, batch), _batched(sin, batch)
    parts = -(-heads // _HEADS) + -(-kv_heads // _HEADS)
    if batch * tokens:
        with on_device(q):
            _qk_norm_rope_fwd_kernel[(batch * tokens, parts)](
                q_rows,
                k_rows,
                q_weight.contiguous(),
                k_weight.contiguous(),
                cos,
                sin,
                q_out,
                k_out,
                tokens,
                q_rows.stride(0),
                k_rows.stride(0),
                *cos.stride()[:2],
                *sin.stride()[:2],
                eps,
                H=heads,
                K=kv_heads,
                D=size,
                **_tile(size, _FORWARD_WARPS),
            )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


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
        grads: of the outputs q [B, H, T, D], k [B, K, T, D] and perhaps v [B, K, T, D].
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
    cos, sin = _batched(cos, batch), _batched(sin, batch)
    groups = [-(-n // _HEADS) for n in (heads, grads[1].shape[1])]
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
            K=grads[1].shape[1],
            D=size,
            VALUES=len(grads) == 3,
            **_tile(size, _BACKWARD_WARPS),
        )
    return parts, counts[0]


def _batched(table: Tensor, batch: int) -> Tensor:
    """cos or sin as [B, T, D] whose last dimension is dense; a shared table is not copied."""
    table = table if table.stride(-1) == 1 else table.contiguous()
    return table.expand(batch, -1, -1)


class QKNormRopeFunction(torch.autograd.Function):
    """q and k, or q, k and v of a packed qkv, from ``projections``."""

    @staticmethod
    def forward(
        ctx, q_weight, k_weight, cos, sin, eps: float, sizes, collect, *projections: Tensor
    ):
        ctx.save_for_backward(q_weight, k_weight, cos, sin, *projections)
        ctx.eps, ctx.sizes, ctx.collect = eps, sizes, collect
        parts = projections if sizes is None else projections[0].split(sizes, dim=-1)
        q, k = qk_norm_rope_forward(parts[0], parts[1], q_weight, k_weight, cos, sin, eps)
        if sizes is None:
            return q, k
        v = parts[2].unflatten(-1, (-1, q_weight.shape[0])).transpose(1, 2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        q_weight, k_weight, cos, sin, *projections = ctx.saved_tensors
        results = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in projections]
        parts, outputs = projections, results
        if ctx.sizes is not None:
            parts = projections[0].split(ctx.sizes, dim=-1)
            outputs = results[0].split(ctx.sizes, dim=-1)
        sums, first = qk_norm_rope_backward(
            grads, (parts[0], parts[1]), tuple(outputs), q_weight, k_weight, cos, sin, ctx.eps
        )
        missing = [
            need and (collect is None or not collect(rows))
            for need, collect, rows in zip(
                ctx.needs_input_grad, ctx.collect, (sums[:first], sums[first:]), strict=False
            )
        ]
        dw_q = dw_k = None
        if any(missing):
            dw_q, dw_k = column_sum(sums, q_weight.dtype, first)
            dw_q = dw_q if missing[0] else None
            dw_k = dw_k.to(k_weight.dtype) if missing[1] else None
        return dw_q, dw_k, None, None, None, None, None, *results


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    collect: tuple[Collect | None, Collect | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Normalised and rotated queries and keys.

    Args:
        q: [B, T, H*D], any float dtype and strides.
        k: [B, T, K*D].
        q_weight, k_weight: [D], the norms' weights, D even.
        cos, sin: [1 or B, T, D], of each token's position; no gradient.
        eps: of the norms.
        collect: for each weight: given parts, fp32 [P, D], whose rows add up to its gradient,
            during backward, may take them and return True: then none is formed. On a GPU.

    Returns:
        q [B, H, T, D] and k [B, K, T, D] in the promoted dtype of ``q`` and ``q_weight``.

    Raises:
        ValueError: shapes do not fit; the message names the argument.
    """
    _check(("q", q), ("k", k), q_weight, k_weight, cos, sin)
    if not runs_triton(q):
        return (
            norm_rope_reference(q, q_weight, cos, sin, eps),
            norm_rope_reference(k, k_weight, cos, sin, eps),
        )
    return QKNormRopeFunction.apply(q_weight, k_weight, cos, sin, eps, None, collect, q, k)


def qkv_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    eps: float = 1e-6,
    *,
    collect: tuple[Collect | None, Collect | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`qk_norm_rope` of a packed projection; its gradient is one tensor again.

    Args:
        qkv: [B, T, (H+2K)*D]: queries, keys, values.
        q_heads: H.

    Returns:
        q [B, H, T, D], k [B, K, T, D], and v [B, K, T, D], a view of ``qkv``.

    Raises:
        ValueError: shapes do not fit; the message names the argument.
    """
    size = q_weight.shape[0]
    rest = qkv.shape[-1] - q_heads * size
    if rest <= 0 or rest % (2 * size):
        raise ValueError(
            f"qkv: {qkv.shape[-1]} columns are not {q_heads} query heads and as many key as value "
            f"heads of {size}"
        )
    sizes = [q_heads * size, rest // 2, rest // 2]
    _check(("qkv", qkv), ("qkv", qkv), q_weight, k_weight, cos, sin)
    if not runs_triton(qkv):
        q, k, v = qkv.split(sizes, dim=-1)
        return (
            norm_rope_reference(q, q_weight, cos, sin, eps),
            norm_rope_reference(k, k_weight, cos, sin, eps),
            v.unflatten(-1, (-1, size)).transpose(1, 2),
        )
    return QKNormRopeFunction.apply(q_weight, k_weight, cos, sin, eps, sizes, collect, qkv)


def _check(
    q: tuple[str, Tensor],
    k: tuple[str, Tensor],
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    size = q_weight.shape[0]
    if size % 2 or k_weight.shape != q_weight.shape:
        raise ValueError(
            f"k_weight: {tuple(k_weight.shape)} must have q_weight's shape "
            f"{tuple(q_weight.shape)}, of even length"
        )
    for name, x in (q, k):
        if x.dim() != 3 or x.shape[-1] % size:
            raise ValueError(f"{name}: {tuple(x.shape)} must be [B, T, heads * {size}]")
    batch, tokens, _ = q[1].shape
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, batch)
        if not fits or table.shape[1:] != (tokens, size):
            raise ValueError(
                f"{name}: {tuple(table.shape)} must be [1 or {batch}, {tokens}, {size}]"
            )

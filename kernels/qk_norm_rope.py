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

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.column_sum import Collect, column_sum
from forge.kernels.qk_norm_rope_backward import (
    HEADS,
    batched,
    load_rotation,
    qk_norm_rope_backward,
    tile_of_heads,
)
from forge.kernels.rms_norm import rms_norm_reference
from forge.kernels.runtime import (
    as_rows,
    begin,
    early_launch,
    on_device,
    runs_triton,
    tl,
    triton,
)


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
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0) // T
    t = (tl.program_id(0) - b * T).to(tl.int64)
    b = b.to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = tl.arange(0, BLOCK)[None, :]
    cos_ptr += b * cos_batch + t * cos_pitch
    sin_ptr += b * sin_batch + t * sin_pitch
    rotation = load_rotation(cos_ptr, sin_ptr, c, c < D // 2, D)
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


_WARPS = 2  # 16 bytes an access


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
    cos, sin = batched(cos, batch), batched(sin, batch)
    parts = -(-heads // HEADS) + -(-kv_heads // HEADS)
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
                **tile_of_heads(size, _WARPS),
                **early_launch(q_rows),
            )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


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
        dws = norm_weights_backward(
            sums, first, (q_weight, k_weight), ctx.needs_input_grad[:2], ctx.collect
        )
        return *dws, None, None, None, None, None, *results


def norm_weights_backward(
    sums: Tensor,
    first: int,
    weights: tuple[Tensor, Tensor],
    needed: Sequence[bool],
    collect: tuple[Collect | None, Collect | None],
) -> list[Tensor | None]:
    """Those of both weights, from what :func:`qk_norm_rope_backward` returns.

    None where one is not needed or ``collect`` takes its parts.
    """
    missing = [
        need and (take is None or not take(rows))
        for need, take, rows in zip(needed, collect, (sums[:first], sums[first:]), strict=True)
    ]
    if not any(missing):
        return [None, None]
    both = column_sum(sums, weights[0].dtype, first)
    return [
        dw.to(weight.dtype) if miss else None
        for dw, weight, miss in zip(both, weights, missing, strict=True)
    ]


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
    sizes = check_packed(qkv, q_weight, k_weight, cos, sin, q_heads)
    if not runs_triton(qkv):
        q, k, v = qkv.split(sizes, dim=-1)
        return (
            norm_rope_reference(q, q_weight, cos, sin, eps),
            norm_rope_reference(k, k_weight, cos, sin, eps),
            v.unflatten(-1, (-1, size)).transpose(1, 2),
        )
    return QKNormRopeFunction.apply(q_weight, k_weight, cos, sin, eps, sizes, collect, qkv)


def check_packed(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, q_heads: int
) -> list[int]:
    """The columns of q, k and v of ``qkv``; ValueError where something does not fit."""
    size = q_weight.shape[0]
    rest = qkv.shape[-1] - q_heads * size
    if rest <= 0 or rest % (2 * size):
        raise ValueError(
            f"qkv: {qkv.shape[-1]} columns are not {q_heads} query heads and as many key as value "
            f"heads of {size}"
        )
    sizes = [q_heads * size, rest // 2, rest // 2]
    _check(("qkv", qkv), ("qkv", qkv), q_weight, k_weight, cos, sin)
    return sizes


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

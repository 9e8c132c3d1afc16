"""Causal attention, made for short sequences: every query sees the keys up to its own position.

    s = scale * q k^T                   minus infinity where the key is behind the query
    p = softmax(s) = exp2(log2(e) * s - lse),     lse = log2(sum over keys of exp2(log2(e) * s))
    out = p v

and backward, with delta = the sum over D of dout * out:

    dv = p^T dout,    ds = p * (dout v^T - delta),    dq = scale * ds k,    dk = scale * ds^T q

Shapes: q, out [B, H, T, D]; k, v [B, K, T, D], where heads h * H/K to (h+1) * H/K - 1 of the
queries share head h; B batch, T tokens, D head size. Softmax and sums in fp32, p and ds rounded to
the inputs' dtype for the products (FlashAttention-2, Dao, arXiv 2307.08691). out lies in memory as
[B, T, H, D], as the next projection reads it.

At 512 tokens a step waits for its longest program, not for the tensor cores. So programs are small
and the long ones start first; keys' and queries' gradients are formed by different programs of one
launch, each from scores of its own: two products of seven are done twice, nothing is added up by
atomics, and two runs give the same bits. Kernels made for Hopper, which may take the place of
these, are in attention_hopper.py, attention_hopper_long.py and attention_hopper_backward.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.attention_backward import attention_backward
from forge.kernels.attention_tiles import (
    common_options,
    described,
    dot,
    loadable,
    runs_on_hopper,
    store_rows,
    tile_of,
    wide_block,
)
from forge.kernels.runtime import (
    begin,
    early_launch,
    on_device,
    runs_triton,
    tl,
    triton,
)

HEAD_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_PAD = 64  # rows of lse and delta are a multiple of so many long: whole tiles can be loaded


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """In plain torch, scores and all; differentiable."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (t.to(wide).repeat_interleave(group, dim=1) for t in (k, v))
    s = scale * (q.to(wide) @ k.transpose(-1, -2))
    behind = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    out = s.masked_fill(behind, -math.inf).softmax(-1) @ v
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)


@triton.jit(do_not_specialize=["B", "T"])
def _attention_fwd_kernel(
    q,  # descriptors of q, k and v, whose tiles are [1, 1, BLOCK_Q or BLOCK_K, D]
    k,
    v,
    out_ptr,  # [B, T, H, D]
    lse_ptr,  # fp32 [B * H, pitch]; infinity from T on
    B,
    T,
    lse_pitch,
    c,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    rank = tl.program_id(0) // (B * H)
    head = tl.program_id(0) - rank * (B * H)
    b = head // H
    h = head - b * H
    # The last queries see most keys: they start first.
    first = (tl.cdiv(T, BLOCK_Q) - 1 - rank) * BLOCK_Q
    t = first + tl.arange(0, BLOCK_Q)
    q_tile = tile_of(q, b, h, first, BLOCK_Q, D)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for start in range(0, min(first + BLOCK_Q, T), BLOCK_K):
        k_tile = tile_of(k, b, h // GROUP, start, BLOCK_K, D)
        s = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
        # In every block: a loop of its own for the last one would wait for its loads.
        seen = start + tl.arange(0, BLOCK_K)[None, :] <= t[:, None]
        s = tl.where(seen, s, float("-inf"))
        larger = tl.maximum(m, tl.max(s, axis=1) * c)
        p = tl.exp2(s * c - larger[:, None])
        shrink = tl.exp2(m - larger)
        m = larger
        total = total * shrink + tl.sum(p, axis=1)
        acc *= shrink[:, None]
        v_tile = tile_of(v, b, h // GROUP, start, BLOCK_K, D)
        acc += dot(p.to(v_tile.dtype), v_tile, PRECISION, UPCAST)
    lse = tl.where(t < T, m + tl.log2(total), float("inf"))
    tl.store(lse_ptr + tl.cast(head, tl.int64) * lse_pitch + t, lse, t < lse_pitch)
    store_rows(out_ptr, acc / total[:, None], b, h, first, T, H, D)


def _forward_tile(q: Tensor) -> dict[str, int]:
    if q.element_size() == 4:
        block = wide_block(q)
        return dict(BLOCK_Q=block, BLOCK_K=block, num_warps=4, num_stages=2)
    # 64 rows are what four warps multiply at once.
    return dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` [B, H, T, D] and ``lse`` fp32 [B * H, T rounded up], by the kernel."""
    batch, heads, tokens, size = q.shape
    out = torch.empty((batch, tokens, heads, size), dtype=q.dtype, device=q.device)
    pitch = -(-tokens // _PAD) * _PAD
    lse = torch.empty((batch * heads, pitch), dtype=torch.float32, device=q.device)
    tile = _forward_tile(q)
    q, k, v = map(loadable, (q, k, v))
    if out.numel() and runs_on_hopper(q, "long forward"):
        from forge.kernels.attention_hopper_long import attention_forward_hopper_long

        attention_forward_hopper_long(q, k, v, scale, out, lse)
    elif out.numel() and runs_on_hopper(q, "forward"):
        from forge.kernels.attention_hopper import attention_forward_hopper

        attention_forward_hopper(q, k, v, scale, out, lse)
    elif out.numel():
        with on_device(q):
            _attention_fwd_kernel[(-(-tokens // tile["BLOCK_Q"]) * batch * heads,)](
                described(q, tile["BLOCK_Q"]),
                described(k, tile["BLOCK_K"]),
                described(v, tile["BLOCK_K"]),
                out,
                lse,
                batch,
                tokens,
                pitch,
                scale * math.log2(math.e),
                **common_options(q, k),
                **tile,
                **early_launch(q),
            )
    return out.transpose(1, 2), lse


class AttentionFunction(torch.autograd.Function):
    """Causal attention of q, k and v."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = attention_forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        return *attention_backward(dout, q, k, v, out, lse, ctx.scale), None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """``softmax(scale * q k^T) v``, in which every query sees the keys up to its own position.

    As ``torch.nn.functional.scaled_dot_product_attention(is_causal=True, enable_gqa=True)``; made
    for a few thousand tokens or fewer on Hopper, right for any number. Strides are free: views of a
    packed projection are read where they lie, if what the GPU's copy engine asks for holds
    (elements of a head side by side, everything else a multiple of 16 bytes); otherwise from a
    copy.

    Args:
        q: [B, H, T, D], bf16, fp16 or fp32; D is 16, 32, 64 or 128.
        k, v: [B, K, T, D] of the same dtype, H a multiple of K.
        scale: of the scores, above 0; ``D ** -0.5`` by default.

    Returns:
        [B, H, T, D] in the dtype of ``q``, whose memory is [B, T, H, D].

    Raises:
        ValueError: a shape, dtype or scale does not fit; the message names the argument.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_attention(q, k, v, scale)
    if not runs_triton(q):
        return attention_reference(q, k, v, scale)
    return AttentionFunction.apply(q, k, v, scale)


def check_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """ValueError where something does not fit."""
    if q.dim() != 4 or q.shape[3] not in HEAD_SIZES:
        raise ValueError(
            f"q: {tuple(q.shape)} must be [B, H, T, D] with D one of "
            f"{', '.join(map(str, HEAD_SIZES))}; use torch's SDPA"
        )
    batch, heads, tokens, size = q.shape
    for name, t in (("k", k), ("v", v)):
        if t.dim() != 4 or (t.shape[0], *t.shape[2:]) != (batch, tokens, size):
            raise ValueError(
                f"{name}: {tuple(t.shape)} must be [{batch}, K, {tokens}, {size}], as many tokens "
                "as q; use torch's SDPA for others"
            )
        if t.shape[1] != k.shape[1] or not t.shape[1] or heads % t.shape[1]:
            raise ValueError(
                f"{name}: {t.shape[1]} heads; k and v must have as many, a divisor of q's {heads}"
            )
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"{name}: {t.dtype} on {t.device} must be as q, {q.dtype} on {q.device}"
            )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be above 0 and finite")
    if runs_triton(q) and q.dtype not in DTYPES:
        raise ValueError(f"q: {q.dtype} is not bf16, fp16 or fp32; use torch's SDPA")

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
atomics, and two runs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.runtime import INTERPRETED, on_device, processors, runs_triton, tl, triton

HEAD_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_PAD = 64  # rows of lse and delta are a multiple of so many long: whole tiles can be loaded
_DELTA_ROWS = _SUM_ROWS = 32  # tokens of a program
# Up to so many tokens query heads that share keys go to programs of their own. A guess, to be
# measured: from about a wave of programs on it only adds work.
_SPLIT_TOKENS = 1024


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


@triton.jit
def _tile(heads, b, h, start, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of a head, [ROWS, D]; zeros from T on. ``heads``: a descriptor of [B, heads, T, D]."""
    return heads.load([b, h, start, 0]).reshape(ROWS, D)


@triton.jit
def _rows(x, b, h, start, T, ROWS: tl.constexpr, D: tl.constexpr):
    """The same through pointers. ``x``: address and strides by batch, head and token."""
    r = tl.arange(0, ROWS)[:, None]
    ptr = x[0] + tl.cast(b, tl.int64) * x[1] + tl.cast(h, tl.int64) * x[2]
    ptr += tl.cast(start, tl.int64) * x[3]
    return tl.load(ptr + r * x[3] + tl.arange(0, D)[None, :], r < T - start, other=0.0)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _store(ptr, x, b, h, start, T, HEADS: tl.constexpr, D: tl.constexpr):
    """Write rows of a head, [ROWS, D], into memory [B, T, HEADS, D]."""
    r = tl.arange(0, x.shape[0])[:, None]
    ptr += ((tl.cast(b, tl.int64) * T + start) * HEADS + h) * D
    ptrs = ptr + r * (HEADS * D) + tl.arange(0, D)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), r < T - start)


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
):
    rank = tl.program_id(0) // (B * H)
    head = tl.program_id(0) - rank * (B * H)
    b = head // H
    h = head - b * H
    # The last queries see most keys: they start first.
    first = (tl.cdiv(T, BLOCK_Q) - 1 - rank) * BLOCK_Q
    t = first + tl.arange(0, BLOCK_Q)
    q_tile = _tile(q, b, h, first, BLOCK_Q, D)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for start in range(0, min(first + BLOCK_Q, T), BLOCK_K):
        k_tile = _tile(k, b, h // GROUP, start, BLOCK_K, D)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
        # In every block: a loop of its own for the last one would wait for its loads.
        seen = start + tl.arange(0, BLOCK_K)[None, :] <= t[:, None]
        s = tl.where(seen, s, float("-inf"))
        larger = tl.maximum(m, tl.max(s, axis=1) * c)
        p = tl.exp2(s * c - larger[:, None])
        shrink = tl.exp2(m - larger)
        m = larger
        total = total * shrink + tl.sum(p, axis=1)
        acc *= shrink[:, None]
        v_tile = _tile(v, b, h // GROUP, start, BLOCK_K, D)
        acc += _dot(p.to(v_tile.dtype), v_tile, PRECISION, UPCAST)
    lse = tl.where(t < T, m + tl.log2(total), float("inf"))
    tl.store(lse_ptr + tl.cast(head, tl.int64) * lse_pitch + t, lse, t < lse_pitch)
    _store(out_ptr, acc / total[:, None], b, h, first, T, H, D)


@triton.jit(do_not_specialize=["T"])
def _attention_delta_kernel(
    dout,  # as _rows takes it
    out,
    delta_ptr,  # fp32 [B * H, pitch]; zero from T on
    T,
    delta_pitch,
    H: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    dout_rows = _rows(dout, head // H, head % H, first, T, ROWS, D).to(tl.float32)
    out_rows = _rows(out, head // H, head % H, first, T, ROWS, D).to(tl.float32)
    t = first + tl.arange(0, ROWS)
    delta_ptr += head.to(tl.int64) * delta_pitch
    tl.store(delta_ptr + t, tl.sum(dout_rows * out_rows, axis=1), t < delta_pitch)


@triton.jit
def _dk_dv(
    q, dout, lse, delta, k, v, dk_ptr, dv_ptr, b, h, first, T, c, scale,
    H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values from ``first`` on, by query heads h to h + HEADS.

    Scores are transposed, [keys, queries]: p and ds then are left operands, which the tensor cores
    read from registers.
    """
    t = first + tl.arange(0, BLOCK)
    # Through pointers: every load of a descriptor outside a loop is waited for at once.
    k_tile = _rows(k, b, h // GROUP, first, T, BLOCK, D)
    v_tile = _rows(v, b, h // GROUP, first, T, BLOCK, D)
    dk = tl.zeros((BLOCK, D), tl.float32)
    dv = tl.zeros((BLOCK, D), tl.float32)
    blocks = tl.cdiv(T - first, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(HEADS * blocks):
        head = h + i // blocks
        start = first + i % blocks * BLOCK
        q_tile = _tile(q, b, head, start, BLOCK, D)
        s = _dot(k_tile, tl.trans(q_tile), PRECISION, UPCAST)
        # Queries from T on have an infinite lse: p is zero.
        p = tl.exp2(s * c - lse.load([b * H + head, start]))
        u = start + tl.arange(0, BLOCK)
        p = tl.where(t[:, None] <= u[None, :], p, 0.0)
        do_tile = _tile(dout, b, head, start, BLOCK, D)
        dp = _dot(v_tile, tl.trans(do_tile), PRECISION, UPCAST)
        dv += _dot(p.to(do_tile.dtype), do_tile, PRECISION, UPCAST)
        ds = p * (dp - delta.load([b * H + head, start]))
        dk += _dot(ds.to(q_tile.dtype), q_tile, PRECISION, UPCAST)
    _store(dv_ptr, dv, b, h // HEADS, first, T, H // HEADS, D)
    _store(dk_ptr, dk * scale, b, h // HEADS, first, T, H // HEADS, D)


@triton.jit
def _dq(
    k, v, q, dout, lse_ptr, delta_ptr, dq_ptr, b, h, first, T, pitch, c, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of head h from ``first`` on."""
    t = first + tl.arange(0, BLOCK)
    q_tile = _rows(q, b, h, first, T, BLOCK, D)
    do_tile = _rows(dout, b, h, first, T, BLOCK, D)
    row = tl.cast(b * H + h, tl.int64) * pitch
    lse = tl.load(lse_ptr + row + t)
    if PDL:
        tl.extra.cuda.gdc_wait()
    delta = tl.load(delta_ptr + row + t)
    dq = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, min(first + BLOCK, T), BLOCK):
        k_tile = _tile(k, b, h // GROUP, start, BLOCK, D)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
        p = tl.exp2(s * c - lse[:, None])
        p = tl.where(start + tl.arange(0, BLOCK)[None, :] <= t[:, None], p, 0.0)
        v_tile = _tile(v, b, h // GROUP, start, BLOCK, D)
        dp = _dot(do_tile, tl.trans(v_tile), PRECISION, UPCAST)
        ds = p * (dp - delta[:, None])
        dq += _dot(ds.to(k_tile.dtype), k_tile, PRECISION, UPCAST)
    _store(dq_ptr, dq * scale, b, h, first, T, H, D)


@triton.jit(do_not_specialize=["B", "T", "turn"])
def _attention_bwd_kernel(
    q,  # descriptors, whose tiles are [1, 1, BLOCK, D]
    k,
    v,
    dout,
    lse,  # descriptors of fp32 [B * H, pitch], whose tiles are [1, BLOCK]
    delta,
    q_rows,  # the same tensors, as _rows takes them
    k_rows,
    v_rows,
    dout_rows,
    lse_ptr,
    delta_ptr,
    dq_ptr,  # [B, T, H, D]
    dk_ptr,  # [B, T, H / HEADS, D]
    dv_ptr,
    B,
    T,
    pitch,
    turn,  # from this program on the order is reversed
    c,
    scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rank by rank, from the longest programs to the shortest: those of B * H / HEADS heads of
    # keys, then those of B * H heads of queries.
    count = B * (H // HEADS)
    pid = tl.program_id(0)
    if pid >= turn:
        pid = turn + tl.num_programs(0) - 1 - pid
    rank = pid // (count + B * H)
    i = pid - rank * (count + B * H)
    if i < count:
        b = i // (H // HEADS)
        h = (i - b * (H // HEADS)) * HEADS
        _dk_dv(
            q, dout, lse, delta, k_rows, v_rows, dk_ptr, dv_ptr, b, h, rank * BLOCK, T, c, scale,
            H, GROUP, HEADS, D, PRECISION, UPCAST, PDL, BLOCK,
        )  # fmt: skip
    else:
        b = (i - count) // H
        h = i - count - b * H
        first = (tl.cdiv(T, BLOCK) - 1 - rank) * BLOCK
        _dq(
            k, v, q_rows, dout_rows, lse_ptr, delta_ptr, dq_ptr, b, h, first, T, pitch, c, scale,
            H, GROUP, D, PRECISION, UPCAST, PDL, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _sum_heads_kernel(
    parts_ptr,  # fp32 [rows, GROUP, D]
    out_ptr,  # [rows, D]
    rows,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = r < rows
    r = r.to(tl.int64)
    d = tl.arange(0, D)[None, :]
    total = tl.zeros((ROWS, D), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for g in tl.static_range(GROUP):
        total += tl.load(parts_ptr + (r * GROUP + g) * D + d, mask, other=0.0)
    tl.store(out_ptr + r * D + d, total.to(out_ptr.dtype.element_ty), mask)


def _loadable(t: Tensor) -> Tensor:
    """``t`` [B, heads, T, D], copied if the tensor memory engine could not read it."""
    size = t.element_size()
    strides = [stride for n, stride in zip(t.shape[:3], t.stride(), strict=False) if n > 1]
    aligned = t.data_ptr() % 16 == 0 and all(s > 0 and s * size % 16 == 0 for s in strides)
    return t if aligned and t.stride(3) == 1 else t.contiguous()


def _strides(t: Tensor) -> list[int]:
    """By batch, head and token; those of dimensions of one element, which may be any, aligned."""
    size = t.shape[3]
    return [s if n > 1 else size for n, s in zip(t.shape[:3], t.stride(), strict=False)]


def _described(t: Tensor, rows: int) -> Any:
    """A descriptor of ``t`` [B, heads, T, D] for tiles of so many rows of a head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), [*_strides(t), 1], [1, 1, rows, t.shape[3]])


def _described_rows(t: Tensor, block: int) -> Any:
    """A descriptor of ``t`` [rows, pitch] for so many neighbours of a row."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, block])


def _addressed(t: Tensor) -> tuple[Any, ...]:
    return (t, *_strides(t))


def _forward_tile(q: Tensor) -> dict[str, int]:
    if q.element_size() == 4:
        block = _wide_block(q)
        return dict(BLOCK_Q=block, BLOCK_K=block, num_warps=4, num_stages=2)
    # 64 rows are what four warps multiply at once.
    return dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3)


def _backward_tile(q: Tensor) -> dict[str, int]:
    # Two stages leave room for two programs on a multiprocessor.
    block = _wide_block(q) if q.element_size() == 4 else 64
    return dict(BLOCK=block, num_warps=4, num_stages=2)


def _wide_block(q: Tensor) -> int:
    """Rows of an fp32 tile: it is multiplied outside the tensor cores, and lies in registers."""
    return 16 if q.shape[3] > 32 else 32


def _common(q: Tensor, k: Tensor) -> dict[str, Any]:
    heads = q.shape[1]
    # fp32 as such, not TF32: nobody who asks for it wants it fast.
    return dict(
        H=heads, GROUP=heads // k.shape[1], D=q.shape[3], PRECISION="ieee", UPCAST=INTERPRETED
    )


def _splits(q: Tensor, k: Tensor) -> bool:
    """Whether every query head has a program of its own for its share of dk and dv.

    Fewer tokens than fill the GPU: the longest program, which goes through all heads that share
    keys, would be what the step waits for.
    """
    return k.shape[1] < q.shape[1] and q.shape[0] * q.shape[2] <= _SPLIT_TOKENS


def _turn(programs: int, q: Tensor) -> int:
    """From which program on the shortest come first.

    Where all run at once, two on a multiprocessor, the longest ones so share theirs with the
    shortest.
    """
    return processors(q) if programs <= 2 * processors(q) else programs


def _launches_early(q: Tensor) -> bool:
    """Whether a kernel may start before the end of the one whose results it waits for."""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` [B, H, T, D] and ``lse`` fp32 [B * H, T rounded up], by the kernel."""
    batch, heads, tokens, size = q.shape
    out = torch.empty((batch, tokens, heads, size), dtype=q.dtype, device=q.device)
    pitch = -(-tokens // _PAD) * _PAD
    lse = torch.empty((batch * heads, pitch), dtype=torch.float32, device=q.device)
    tile = _forward_tile(q)
    if out.numel():
        q, k, v = map(_loadable, (q, k, v))
        with on_device(q):
            _attention_fwd_kernel[(-(-tokens // tile["BLOCK_Q"]) * batch * heads,)](
                _described(q, tile["BLOCK_Q"]),
                _described(k, tile["BLOCK_K"]),
                _described(v, tile["BLOCK_K"]),
                out,
                lse,
                batch,
                tokens,
                pitch,
                scale * math.log2(math.e),
                **_common(q, k),
                **tile,
            )
    return out.transpose(1, 2), lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in memory as [B, T, heads, D], by the kernels."""
    batch, heads, tokens, size = q.shape
    kv_heads, pdl = k.shape[1], _launches_early(q)
    early = dict(launch_pdl=True) if pdl else {}
    tile, common = _backward_tile(q), _common(q, k)
    split = _splits(q, k)
    dq = torch.empty((batch, tokens, heads, size), dtype=q.dtype, device=q.device)
    dkv = torch.empty((2, batch, tokens, kv_heads, size), dtype=q.dtype, device=q.device)
    parts = dkv
    if split:
        shape = (2, batch, tokens, heads, size)
        parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    delta = torch.empty_like(lse)
    if dq.numel():
        dout, q, k, v = map(_loadable, (dout, q, k, v))
        with on_device(q):
            _attention_delta_kernel[(batch * heads, lse.shape[1] // _DELTA_ROWS)](
                _addressed(dout),
                _addressed(out),
                delta,
                tokens,
                delta.shape[1],
                H=heads,
                D=size,
                PDL=pdl,
                ROWS=_DELTA_ROWS,
            )
            programs = batch * (heads + (heads if split else kv_heads))
            programs *= -(-tokens // tile["BLOCK"])
            _attention_bwd_kernel[(programs,)](
                *(_described(t, tile["BLOCK"]) for t in (q, k, v, dout)),
                *(_described_rows(t, tile["BLOCK"]) for t in (lse, delta)),
                *map(_addressed, (q, k, v, dout)),
                lse,
                delta,
                dq,
                *parts,
                batch,
                tokens,
                lse.shape[1],
                _turn(programs, q),
                scale * math.log2(math.e),
                scale,
                HEADS=1 if split else heads // kv_heads,
                PDL=pdl,
                **common,
                **tile,
                **early,
            )
            if split:
                rows = 2 * batch * tokens * kv_heads
                _sum_heads_kernel[(-(-rows // _SUM_ROWS),)](
                    parts, dkv, rows, GROUP=heads // kv_heads, D=size, PDL=pdl, ROWS=_SUM_ROWS,
                    **early,
                )  # fmt: skip
    return dq.transpose(1, 2), dkv[0].transpose(1, 2), dkv[1].transpose(1, 2)


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
    _check(q, k, v, scale)
    if not runs_triton(q):
        return attention_reference(q, k, v, scale)
    if q.dtype not in DTYPES:
        raise ValueError(f"q: {q.dtype} is not bf16, fp16 or fp32; use torch's SDPA")
    return AttentionFunction.apply(q, k, v, scale)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
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

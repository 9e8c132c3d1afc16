"""Gradients of causal attention; formulas and shapes are in attention.py.

The longest programs start first; keys' and queries' gradients are formed by different programs of
one launch. Where query heads that share keys are spread over programs, each leaves a part, fp32, of
its keys' gradients.

On Hopper other kernels may take their place: kernels/attention_hopper_backward.py that of the large
one, kernels/attention_hopper_backward_long.py that of all but the sum of parts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.kernels.attention_fixed_point import finish, prepare
from forge.kernels.attention_tiles import (
    addressed,
    common_options,
    described,
    described_rows,
    dot,
    loadable,
    rows_of,
    runs_on_hopper,
    store_rows,
    tile_of,
    wide_block,
)
from forge.kernels.runtime import begin, early_launch, on_device, processors, tl, triton

_DELTA_ROWS = _SUM_ROWS = 32  # tokens of a program
# Up to so many tokens query heads that share keys go to programs of their own. A guess, to be
# measured: from about a wave of programs on it only adds work.
_SPLIT_TOKENS = 1024


@triton.jit(do_not_specialize=["T"])
def _attention_delta_kernel(
    dout,  # as rows_of takes it
    out,
    delta_ptr,  # fp32 [B * H, pitch]; zero from T on
    T,
    delta_pitch,
    H: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
):
    begin(PDL)
    head = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    dout_rows = rows_of(dout, head // H, head % H, first, T, ROWS, D).to(tl.float32)
    out_rows = rows_of(out, head // H, head % H, first, T, ROWS, D).to(tl.float32)
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

    What it loads before it waits is older than the kernel in front, which forms delta: that one has
    waited for it.

    Scores are transposed, [keys, queries]: p and ds then are left operands, which the tensor cores
    read from registers.
    """
    t = first + tl.arange(0, BLOCK)
    # Through pointers: every load of a descriptor outside a loop is waited for at once.
    k_tile = rows_of(k, b, h // GROUP, first, T, BLOCK, D)
    v_tile = rows_of(v, b, h // GROUP, first, T, BLOCK, D)
    dk = tl.zeros((BLOCK, D), tl.float32)
    dv = tl.zeros((BLOCK, D), tl.float32)
    blocks = tl.cdiv(T - first, BLOCK)
    begin(PDL)
    for i in range(HEADS * blocks):
        head = h + i // blocks
        start = first + i % blocks * BLOCK
        q_tile = tile_of(q, b, head, start, BLOCK, D)
        s = dot(k_tile, tl.trans(q_tile), PRECISION, UPCAST)
        # Queries from T on have an infinite lse: p is zero.
        p = tl.exp2(s * c - lse.load([b * H + head, start]))
        u = start + tl.arange(0, BLOCK)
        p = tl.where(t[:, None] <= u[None, :], p, 0.0)
        do_tile = tile_of(dout, b, head, start, BLOCK, D)
        dp = dot(v_tile, tl.trans(do_tile), PRECISION, UPCAST)
        dv += dot(p.to(do_tile.dtype), do_tile, PRECISION, UPCAST)
        ds = p * (dp - delta.load([b * H + head, start]))
        dk += dot(ds.to(q_tile.dtype), q_tile, PRECISION, UPCAST)
    store_rows(dv_ptr, dv, b, h // HEADS, first, T, H // HEADS, D)
    store_rows(dk_ptr, dk * scale, b, h // HEADS, first, T, H // HEADS, D)


@triton.jit
def _dq(
    k, v, q, dout, lse_ptr, delta_ptr, dq_ptr, b, h, first, T, pitch, c, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of head h from ``first`` on."""
    t = first + tl.arange(0, BLOCK)
    q_tile = rows_of(q, b, h, first, T, BLOCK, D)
    do_tile = rows_of(dout, b, h, first, T, BLOCK, D)
    row = tl.cast(b * H + h, tl.int64) * pitch
    lse = tl.load(lse_ptr + row + t)
    begin(PDL)
    delta = tl.load(delta_ptr + row + t)
    dq = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, min(first + BLOCK, T), BLOCK):
        k_tile = tile_of(k, b, h // GROUP, start, BLOCK, D)
        s = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
        p = tl.exp2(s * c - lse[:, None])
        p = tl.where(start + tl.arange(0, BLOCK)[None, :] <= t[:, None], p, 0.0)
        v_tile = tile_of(v, b, h // GROUP, start, BLOCK, D)
        dp = dot(do_tile, tl.trans(v_tile), PRECISION, UPCAST)
        ds = p * (dp - delta[:, None])
        dq += dot(ds.to(k_tile.dtype), k_tile, PRECISION, UPCAST)
    store_rows(dq_ptr, dq * scale, b, h, first, T, H, D)


@triton.jit(do_not_specialize=["B", "T", "turn"])
def _attention_bwd_kernel(
    q,  # descriptors, whose tiles are [1, 1, BLOCK, D]
    k,
    v,
    dout,
    lse,  # descriptors of fp32 [B * H, pitch], whose tiles are [1, BLOCK]
    delta,
    q_rows,  # the same tensors, as rows_of takes them
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
    begin(PDL)
    for g in tl.static_range(GROUP):
        total += tl.load(parts_ptr + (r * GROUP + g) * D + d, mask, other=0.0)
    tl.store(out_ptr + r * D + d, total.to(out_ptr.dtype.element_ty), mask)


def _backward_tile(q: Tensor) -> dict[str, int]:
    # Two stages leave room for two programs on a multiprocessor.
    block = wide_block(q) if q.element_size() == 4 else 64
    return dict(BLOCK=block, num_warps=4, num_stages=2)


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


def _delta(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The product of the rows of ``dout`` and ``out``, as ``lse`` lies."""
    delta = torch.empty_like(lse)
    _, heads, tokens, size = dout.shape
    _attention_delta_kernel[(lse.shape[0], lse.shape[1] // _DELTA_ROWS)](
        addressed(dout),
        addressed(out),
        delta,
        tokens,
        delta.shape[1],
        H=heads,
        D=size,
        ROWS=_DELTA_ROWS,
        **early_launch(dout),
    )
    return delta


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    whole: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in memory as [B, T, heads, D], by the kernels.

    Args:
        whole: False may leave those of k and v in parts: fp32 [B, H, T, D], of which H/K neighbours
            add up to one. Who reads them next can add as he loads, and saves a kernel.
    """
    batch, heads, tokens, size = q.shape
    kv_heads, early = k.shape[1], early_launch(q)
    tile, common = _backward_tile(q), common_options(q, k)
    long, hopper = runs_on_hopper(q, "long backward"), runs_on_hopper(q, "backward")
    if long:
        from forge.kernels.attention_hopper_backward_long import (
            attention_backward_long,
            whole_groups,
        )

        split = kv_heads < heads and not whole_groups(q, k)
    else:
        split = kv_heads < heads if hopper else _splits(q, k)
    dq = torch.empty((batch, tokens, heads, size), dtype=q.dtype, device=q.device)
    shape, kept = (2, batch, tokens, kv_heads, size), q.dtype
    if split:
        shape, kept = (2, batch, tokens, heads, size), torch.float32
    parts = dq.new_empty(shape, dtype=kept)
    dkv = dq.new_empty((2, batch, tokens, kv_heads, size)) if split and whole else parts
    if dq.numel():
        dout, q, k, v = map(loadable, (dout, q, k, v))
        with on_device(q):
            if long:
                minus, fine, sizes, sums = prepare(dout, out, k, v, lse)
                attention_backward_long(dout, q, k, v, lse, minus, fine, sizes, sums, scale, *parts)
                finish(sums, fine, sizes, scale, dq)
            elif hopper:
                from forge.kernels.attention_hopper_backward import attention_backward_hopper

                delta = _delta(dout, out, lse)
                attention_backward_hopper(dout, q, k, v, lse, delta, scale, dq, *parts)
            else:
                delta = _delta(dout, out, lse)
                programs = batch * (heads + (heads if split else kv_heads))
                programs *= -(-tokens // tile["BLOCK"])
                _attention_bwd_kernel[(programs,)](
                    *(described(t, tile["BLOCK"]) for t in (q, k, v, dout)),
                    *(described_rows(t, tile["BLOCK"]) for t in (lse, delta)),
                    *map(addressed, (q, k, v, dout)),
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
                    **common,
                    **tile,
                    **early,
                )
            if split and whole:
                rows = 2 * batch * tokens * kv_heads
                _sum_heads_kernel[(-(-rows // _SUM_ROWS),)](
                    parts, dkv, rows, GROUP=heads // kv_heads, D=size, ROWS=_SUM_ROWS,
                    **early,
                )  # fmt: skip
    dk, dv = dkv
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

"""Gradients of causal attention for Hopper and short sequences; formulas are in attention.py.

Programs are for blocks of 64 tokens of a query head. That of block r first forms the gradient of
its queries, from the r + 1 blocks of keys up to its own (three products each), then the share that
this head has in the gradients of its keys and values, from the n - r blocks of queries from its own
on (four products each): together 3 n + 4 to 4 n + 3 products, so that all programs take about as
long. At 512 tokens and 16 heads they are 128 programs, all of which run at once.

Two warpgroups go through every other block, each with sums of its own, which are added up at the
end of either part: half the chain, and one multiplies while the other takes exponentials. Blocks
come through a ring of slots, on into the second part without a gap.

For the second part scores are transposed, [keys, queries]: p and ds then are left operands, read
from registers.

delta comes from the kernel in front: formed here, it would cost a third tile a block. That kernel
has waited for all in front of itself before it let this one start, so everything but delta is
requested before the wait for it.

Why nothing waits for ever. Each warpgroup w has its own ring; nobody else reads it. ``first`` turns
of it are blocks of keys and values, the others up to ``turns`` of queries and their output's
gradient. Turn g goes to slot g % STAGES and is requested once: before the warpgroups start for
g < STAGES, otherwise at the end of turn g - STAGES; always if g < turns, and the loops together
wait once for each such g. Each request arrives once at both barriers of its slot, with whole boxes,
of which what lies outside the tensors is zero. All other barriers complete once.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.attention_hopper import (
    BLOCK,
    described,
    exchange_layout,
    exp2,
    head_block,
    layout_of,
    product_layout,
    rows_block,
    tile,
)
from forge.kernels.hopper_ring import begin, thread_barrier, tma_load, tma_store, view
from forge.kernels.runtime import on_device

# Registers a thread: all there are for two warpgroups.
REGISTERS = gl.constexpr(256)
STAGES = 2  # slots of a warpgroup: two tiles each, and lse and delta of their queries


@gluon.jit
def _pair(R, i, D: gl.constexpr):
    """Both tiles of slot ``i`` as the tensor memory engine writes them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, D], R.dtype)
    return view(R.index(i), R.dtype, [2, 1, 1, BLOCK, D], layout)


@gluon.jit
def _request_turn(
    g, w: gl.constexpr, q, k, v, dout, lse, delta, R, L, x_full, y_full,
    head, b, h, kv, r, first, turns, D: gl.constexpr, STAGES: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Fill the slot of turn ``g``, if there is one; without ``DELTA`` all but delta."""
    i = w * STAGES + g % STAGES
    tiles = _pair(R, i, D)
    x = x_full.index(i)
    y = y_full.index(i)
    bytes: gl.constexpr = BLOCK * D * R.dtype.primitive_bitwidth // 8
    if g < first:
        start = (r - w - 2 * g) * BLOCK
        mbarrier.expect(x, bytes)
        mbarrier.expect(y, bytes)
        tma_load(k, [b, kv, start, 0], x, tiles.index(0))
        tma_load(v, [b, kv, start, 0], y, tiles.index(1))
    elif g < turns:
        start = (r + 1 - w + 2 * (g - first)) * BLOCK
        mbarrier.expect(x, bytes + BLOCK * 4)
        mbarrier.expect(y, bytes + BLOCK * 4)
        tma_load(q, [b, h, start, 0], x, tiles.index(0))
        tma_load(lse, [head, start], x, L.index(2 * i))
        tma_load(dout, [b, h, start, 0], y, tiles.index(1))
        if DELTA:
            tma_load(delta, [head, start], y, L.index(2 * i + 1))


@gluon.jit
def _request_delta(
    g, w: gl.constexpr, delta, L, y_full, head, r, first, turns, STAGES: gl.constexpr
):  # fmt: skip
    """What is missing of turn ``g``."""
    i = w * STAGES + g % STAGES
    if (g >= first) & (g < turns):
        start = (r + 1 - w + 2 * (g - first)) * BLOCK
        tma_load(delta, [head, start], y_full.index(i), L.index(2 * i + 1))


@gluon.jit
def _product(a, b, layout: gl.constexpr):
    """Ask for ``a b^T``, [64, 64], of two tiles."""
    zero = gl.zeros((BLOCK, BLOCK), dtype=gl.float32, layout=layout)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def row_of(L, i, layout: gl.constexpr):
    """64 numbers of the queries of a slot."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return view(L.index(i), gl.float32, [BLOCK], flat).load(layout)


@gluon.jit
def _gradients(
    w: gl.constexpr, q, k, v, dout, lse, delta, lse_ptr, delta_ptr, dq, dk, dv,
    S, R, L, X, s_full, x_full, y_full, merged,
    head, b, h, kv, r, first, turns, c, scale,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``w``. S: the program's own tiles of q, dout, k and v."""
    dtype: gl.constexpr = R.dtype
    scores: gl.constexpr = product_layout(BLOCK)
    result: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    down = gl.arange(0, BLOCK, layout=rows)
    across = gl.arange(0, BLOCK, layout=columns)

    # The gradient of the queries.
    lse_rows = gl.load(lse_ptr + r * BLOCK + down)
    delta_rows = gl.load(delta_ptr + r * BLOCK + down)
    sum_q = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
    mbarrier.wait(s_full.index(0), 0)
    for g in range(0, first):
        i = w * STAGES + g % STAGES
        parity = (g // STAGES) & 1
        tiles = view(R.index(i), dtype, [2, BLOCK, D], matrix)
        mbarrier.wait(x_full.index(i), parity)
        s = _product(tile(S.index(0), D), tiles.index(0), scores)
        mbarrier.wait(y_full.index(i), parity)
        dp = _product(tile(S.index(1), D), tiles.index(1), scores)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p = exp2(s * c - lse_rows[:, None])  # 0 from T on, where lse is infinite
        if w == 0:
            if g == 0:  # the block of the queries themselves
                p = gl.where(across[None, :] <= down[:, None], p, 0.0)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        ds = p * (dp - delta_rows[:, None])
        ds = gl.convert_layout(ds.to(dtype), operand)
        sum_q = warpgroup_mma(ds, tiles.index(0), sum_q, is_async=True)
        sum_q, ds = warpgroup_mma_wait(num_outstanding=0, deps=(sum_q, ds))
        if g + STAGES < turns:
            # Once all four warps have read the slot it is filled again.
            thread_barrier()
            _request_turn(
                g + STAGES, w, q, k, v, dout, lse, delta, R, L, x_full, y_full,
                head, b, h, kv, r, first, turns, D, STAGES, True,
            )  # fmt: skip

    # The second warpgroup hands on its share; the first one adds both, while that is at work on.
    if w == 1:
        X.store(sum_q)
        thread_barrier()
        mbarrier.arrive(merged.index(0), count=1)
    else:
        mbarrier.wait(merged.index(0), 0)
        sum_q += X.load(result)
        # Neither reads the tile of q any more: the result goes there.
        store_rows(dq, sum_q * scale, view(S.index(0), dtype, [1, BLOCK, D], matrix), b, r, h, D)

    # Those of the keys and values.
    sum_k = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
    sum_v = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
    mbarrier.wait(s_full.index(1), 0)
    for g in range(first, turns):
        i = w * STAGES + g % STAGES
        parity = (g // STAGES) & 1
        tiles = view(R.index(i), dtype, [2, BLOCK, D], matrix)
        mbarrier.wait(x_full.index(i), parity)
        s = _product(tile(S.index(2), D), tiles.index(0), scores)
        mbarrier.wait(y_full.index(i), parity)
        dp = _product(tile(S.index(3), D), tiles.index(1), scores)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p = exp2(s * c - row_of(L, 2 * i, columns)[None, :])
        if w == 1:
            if g == first:
                p = gl.where(down[:, None] <= across[None, :], p, 0.0)
        pb = gl.convert_layout(p.to(dtype), operand)
        sum_v = warpgroup_mma(pb, tiles.index(1), sum_v, is_async=True)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        ds = p * (dp - row_of(L, 2 * i + 1, columns)[None, :])
        ds = gl.convert_layout(ds.to(dtype), operand)
        sum_k = warpgroup_mma(ds, tiles.index(0), sum_k, is_async=True)
        sum_v, sum_k, pb, ds = warpgroup_mma_wait(num_outstanding=0, deps=(sum_v, sum_k, pb, ds))
        if g + STAGES < turns:
            thread_barrier()
            _request_turn(
                g + STAGES, w, q, k, v, dout, lse, delta, R, L, x_full, y_full,
                head, b, h, kv, r, first, turns, D, STAGES, True,
            )  # fmt: skip

    # Its ring is empty: the one warpgroup finishes those of the values, the other of the keys.
    thread_barrier()
    wide: gl.constexpr = exchange_layout(D)
    if w == 0:
        kept = sum_v
        other = sum_k
    else:
        kept = sum_k
        other = sum_v
    view(R.index(w * STAGES), gl.float32, [BLOCK, D], wide).store(other)
    thread_barrier()
    mbarrier.arrive(merged.index(1 + w), count=1)
    mbarrier.wait(merged.index(2 - w), 0)
    kept += view(R.index((1 - w) * STAGES), gl.float32, [BLOCK, D], wide).load(result)
    # Of as many bytes as fp32 takes.
    fit: gl.constexpr = 32 // dk.dtype.primitive_bitwidth
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dk.dtype)
    staged = view(R.index(w * STAGES + 1), dk.dtype, [fit, BLOCK, D], flat)
    if w == 0:
        store_rows(dv, kept, staged, b, r, h, D)
    else:
        store_rows(dk, kept * scale, staged, b, r, h, D)
    tma.store_wait(pendings=0)


@gluon.jit
def store_rows(out, x, staged, b, r, h, D: gl.constexpr):
    """Write block ``r`` of a head, [64, D], by way of shared memory [1 or more, 64, D]."""
    dtype: gl.constexpr = out.dtype
    staged.index(0).store(x.to(dtype))
    fence_async_shared()
    thread_barrier()
    layout: gl.constexpr = out.layout
    fit: gl.constexpr = staged.shape[0]
    box = view(staged, dtype, [fit, 1, BLOCK, 1, D], layout)
    tma_store(out, [b, r * BLOCK, h, 0], box.index(0))


@gluon.jit(do_not_specialize=["B", "T"])
def _attention_bwd_hopper_kernel(
    q,  # descriptors: boxes [1, 1, 64, D] of [B, heads, T, D]
    k,
    v,
    dout,
    lse,  # boxes [1, 64] of fp32 [B * H, pitch]
    delta,
    lse_ptr,
    delta_ptr,
    dq,  # boxes [1, 64, 1, D] of [B, T, H, D]
    dk,  # the same: the shares of the query heads
    dv,
    B,
    T,
    pitch,  # a multiple of 64
    c,
    scale,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: blocks of 64 tokens times B * H."""
    D: gl.constexpr = q.block_shape[3]
    r = gl.program_id(0) // (B * H)
    head = gl.program_id(0) - r * (B * H)
    b = head // H
    h = head - b * H
    kv = h // GROUP
    blocks = (T + BLOCK - 1) // BLOCK
    S = gl.allocate_shared_memory(q.dtype, [4] + q.block_shape, q.layout)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK, D], q.dtype)
    R = gl.allocate_shared_memory(q.dtype, [2 * STAGES, 2 * BLOCK, D], matrix)
    L = gl.allocate_shared_memory(gl.float32, [4 * STAGES] + lse.block_shape, lse.layout)
    X = gl.allocate_shared_memory(gl.float32, [BLOCK, D], exchange_layout(D))
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    merged = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(s_full.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(y_full.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(merged.index(i), count=1)
    # Of each warpgroup, turns of keys and values, and all turns.
    first0 = (r + 2) // 2
    first1 = (r + 1) // 2
    turns0 = first0 + (blocks - r) // 2
    turns1 = first1 + (blocks - r + 1) // 2
    bytes: gl.constexpr = 2 * BLOCK * D * q.dtype.primitive_bitwidth // 8
    lse_ptr += head.to(gl.int64) * pitch
    delta_ptr += head.to(gl.int64) * pitch
    mbarrier.expect(s_full.index(0), bytes)
    tma_load(q, [b, h, r * BLOCK, 0], s_full.index(0), S.index(0))
    tma_load(dout, [b, h, r * BLOCK, 0], s_full.index(0), S.index(1))
    for g in gl.static_range(STAGES):
        _request_turn(
            g, 0, q, k, v, dout, lse, delta, R, L, x_full, y_full,
            head, b, h, kv, r, first0, turns0, D, STAGES, False,
        )  # fmt: skip
        _request_turn(
            g, 1, q, k, v, dout, lse, delta, R, L, x_full, y_full,
            head, b, h, kv, r, first1, turns1, D, STAGES, False,
        )  # fmt: skip
    mbarrier.expect(s_full.index(1), bytes)
    tma_load(k, [b, kv, r * BLOCK, 0], s_full.index(1), S.index(2))
    tma_load(v, [b, kv, r * BLOCK, 0], s_full.index(1), S.index(3))
    begin(0)
    for g in gl.static_range(STAGES):
        _request_delta(g, 0, delta, L, y_full, head, r, first0, turns0, STAGES)
        _request_delta(g, 1, delta, L, y_full, head, r, first1, turns1, STAGES)
    gl.warp_specialize(
        [
            (_gradients, (
                0, q, k, v, dout, lse, delta, lse_ptr, delta_ptr, dq, dk, dv,
                S, R, L, X, s_full, x_full, y_full, merged,
                head, b, h, kv, r, first0, turns0, c, scale, D, STAGES,
            )),
            (_gradients, (
                1, q, k, v, dout, lse, delta, lse_ptr, delta_ptr, dq, dk, dv,
                S, R, L, X, s_full, x_full, y_full, merged,
                head, b, h, kv, r, first1, turns1, c, scale, D, STAGES,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


def described_row(t: Tensor) -> Any:
    """A descriptor of fp32 [rows, pitch] for 64 neighbours of a row."""
    block = [1, BLOCK.value]
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout_of(block, t.dtype))


def attention_backward_hopper(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write ``dq``, ``dk`` and ``dv`` [B, T, H, D], the last two of each query head.

    Args:
        dout, q: [B, H, T, D], k, v [B, K, T, D], bf16 or fp16 on a Hopper GPU, D 64 or 128, none
            empty, as ``loadable`` returns them.
        lse, delta: fp32 [B * H, T rounded up to 64]. delta may be written by the kernel directly in
            front, if that begins as :func:`forge.kernels.runtime.begin` does; all else is older.
        dk, dv: of the dtype of q, if H is K, or fp32.
    """
    batch, heads, tokens, size = q.shape
    programs = -(-tokens // BLOCK.value) * batch * heads
    with on_device(q):
        _attention_bwd_hopper_kernel[(programs,)](
            *(described(t, head_block(size)) for t in (q, k, v, dout)),
            described_row(lse),
            described_row(delta),
            lse,
            delta,
            *(described(t, rows_block(size)) for t in (dq, dk, dv)),
            batch,
            tokens,
            lse.shape[1],
            scale * math.log2(math.e),
            scale,
            H=heads,
            GROUP=heads // k.shape[1],
            STAGES=STAGES,
            num_warps=4,
            maxnreg=REGISTERS.value,
            launch_pdl=True,
        )

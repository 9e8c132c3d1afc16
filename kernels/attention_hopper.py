"""Forward of causal attention for Hopper and short sequences; formulas are in attention.py.

A program has 64 queries of a head, and at 512 tokens all programs run at once: what counts is the
longest one, a chain of eight key blocks, each of which waits for a product, its exponentials and
another product. So two warpgroups share the queries: each goes through every other block of 64
keys, from the last one on, with sums of its own, and both halves are added up at the end. That
halves the chain, and one warpgroup multiplies while the other takes exponentials. Within a
warpgroup the scores of the next block are asked for before the last block's product with the
values, as in FlashAttention-3 (Shah et al., arXiv 2407.08608), so that exponentials also run beside
that.

Only the first block a warpgroup takes may hold keys behind a query, so only there is a mask.

Nobody but a warpgroup itself reads the keys and values it asked for: there is no load warp and
there are no barriers for empty slots. Why nothing waits for ever: each warpgroup has a ring of
``STAGES`` slots of k and of v. The block of turn i goes to slot i % STAGES. It is requested once,
at the start for i < STAGES and otherwise at the end of turn i - STAGES + 1, on the same condition,
i < turns, on which the loop waits for it. Each request arrives once at its slot's barrier, with
the whole box, of which what lies outside the tensor is zero. So slot s completes phase i // STAGES
with turn i, and is waited for in that order. ``merged`` completes once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
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

from forge.kernels.attention_tiles import strides_of
from forge.kernels.hopper_ring import begin, halves, thread_barrier, tma_load, tma_store, view
from forge.kernels.runtime import on_device

BLOCK = gl.constexpr(64)  # queries of a program, keys of a turn
STAGES = 3  # slots of keys, and of values, of a warpgroup
# Registers a thread: enough, and few, so that a program may begin beside those of the kernel in
# front.
REGISTERS = gl.constexpr(168)


@gluon.constexpr_function
def exchange_layout(columns):
    """Of an fp32 array through which warpgroups hand on results of products.

    Four threads write 32 bytes of a row; those of the eight rows of an access lie in different
    banks, as far as they can.
    """
    groups = min(columns // 8, 8)
    return gl.SwizzledSharedLayout(8, max(32 // columns, 1), groups, order=[1, 0])


@gluon.constexpr_function
def product_layout(columns):
    """Of the 64 rows that a warpgroup's product has."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def exp2(x):
    """Tiny results are zero, which saves three of four instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def before_next_wait(x):
    """``x``, which is not below 0, computed before whatever is waited for behind this.

    The compiler moves a wait for products up, in front of all arithmetic that does not need them. A
    sleep that never happens stops it.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; mov.b32 $0, $1; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def tile(slot, D: gl.constexpr):
    """A slot as a matrix [64, D]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], slot.dtype)
    return view(slot, slot.dtype, [BLOCK, D], layout)


@gluon.jit
def request(x, b, h, start, barrier, slot):
    """Load 64 rows of a head from ``start`` on; zeros outside the tensor, below 0 too."""
    mbarrier.expect(barrier, BLOCK * x.block_shape[3] * x.dtype.primitive_bitwidth // 8)
    tma_load(x, [b, h, start, 0], barrier, slot)


@gluon.jit
def row_max(x, layout: gl.constexpr):
    """The largest of each row, in ``layout``; by halves: one after the other they would wait."""
    for _ in gl.static_range(3):
        a, b = halves(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(gl.max(x, axis=1), layout)


@gluon.jit
def row_sum(x, layout: gl.constexpr):
    """The sum of each row, in ``layout``."""
    for _ in gl.static_range(3):
        a, b = halves(x)
        x = a + b
    return gl.convert_layout(gl.sum(x, axis=1), layout)


@gluon.jit
def _scores(Q, K, i, full, parity, D: gl.constexpr, layout: gl.constexpr):
    """Ask for the products of the queries with the keys in slot ``i``, [64, 64]."""
    mbarrier.wait(full.index(i), parity)
    zero = gl.zeros((BLOCK, BLOCK), dtype=gl.float32, layout=layout)
    keys = tile(K.index(i), D).permute((1, 0))
    return warpgroup_mma(tile(Q.index(0), D), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    w: gl.constexpr, q, k, v, out, lse_ptr, Q, K, V, ML, q_full, k_full, v_full, merged,
    b, h, kv, first, T, c,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``w``: every other key block, then the left or right half of the result."""
    dtype: gl.constexpr = q.dtype
    scores: gl.constexpr = product_layout(BLOCK)
    result: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    base: gl.constexpr = w * STAGES

    last = first // BLOCK - w  # number of the first block to take, -1 if there is none
    turns = gl.maximum(last // 2 + 1, 1)
    t = first + gl.arange(0, BLOCK, layout=rows)
    key = last * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores))

    request(v, b, kv, last * BLOCK, v_full.index(base), V.index(base))
    for i in gl.static_range(1, STAGES):
        if i < turns:
            start = (last - 2 * i) * BLOCK
            request(k, b, kv, start, k_full.index(base + i), K.index(base + i))
            request(v, b, kv, start, v_full.index(base + i), V.index(base + i))

    mbarrier.wait(q_full, 0)
    s = _scores(Q, K, base, k_full, 0, D, scores)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    seen = (key[None, :] <= t[:, None]) & (key >= 0)[None, :]
    s = gl.where(seen, s, float("-inf"))
    m = row_max(s, rows) * c
    # Without any key m stays minus infinity, and every p is zero.
    p = exp2(s * c - gl.where(m == float("-inf"), 0.0, m)[:, None])
    total = row_sum(p, rows)
    p = gl.convert_layout(p.to(dtype), operand)
    acc = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
    for i in range(1, turns):
        now = base + i % STAGES
        before = base + (i - 1) % STAGES
        s = _scores(Q, K, now, k_full, (i // STAGES) & 1, D, scores)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, tile(V.index(before), D), acc, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        larger = gl.maximum(m, row_max(s, rows) * c)
        r = exp2(s * c - larger[:, None])
        shrink = exp2(m - larger)
        m = larger
        # The exponentials are to run beside the product that is under way.
        total = before_next_wait(total * shrink + row_sum(r, rows))
        r = gl.convert_layout(r.to(dtype), operand)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, result))[:, None]
        p = r
        ahead = i - 1 + STAGES
        if ahead < turns:
            # Once all four warps have read the slots of the turn before, they are filled again.
            thread_barrier()
            start = (last - 2 * ahead) * BLOCK
            request(k, b, kv, start, k_full.index(before), K.index(before))
            request(v, b, kv, start, v_full.index(before), V.index(before))
    end = base + (turns - 1) % STAGES
    mbarrier.wait(v_full.index(end), ((turns - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, tile(V.index(end), D), acc, is_async=True)
    acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
    thread_barrier()

    # Every slot has been read and none is being filled: they hold what the warpgroups exchange.
    half: gl.constexpr = D // 2
    shared: gl.constexpr = exchange_layout(half)
    left, right = halves(acc)
    if w == 0:
        mine = left
        given = right
    else:
        mine = right
        given = left
    view(K.index(base), gl.float32, [BLOCK, half], shared).store(given)
    ML.index(2 * w).store(m)
    ML.index(2 * w + 1).store(total)
    thread_barrier()
    mbarrier.arrive(merged.index(w), count=1)
    mbarrier.wait(merged.index(1 - w), 0)
    theirs = view(K.index((1 - w) * STAGES), gl.float32, [BLOCK, half], shared).load(
        mine.type.layout
    )
    m2 = ML.index(2 - 2 * w).load(rows)
    total2 = ML.index(3 - 2 * w).load(rows)
    both = gl.maximum(m, m2)  # finite: a query sees itself
    a = exp2(m - both)
    a2 = exp2(m2 - both)
    total = total * a + total2 * a2
    if w == 0:
        lse = gl.where(t < T, both + gl.log2(total), float("inf"))
        gl.store(lse_ptr + t, lse)
    column: gl.constexpr = gl.SliceLayout(1, mine.type.layout)
    a = gl.convert_layout(a / total, column)
    a2 = gl.convert_layout(a2 / total, column)
    mine = mine * a[:, None] + theirs * a2[:, None]
    layout: gl.constexpr = out.layout
    staged = view(V.index(base), dtype, [2, 1, BLOCK, 1, half], layout).index(0)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, half], dtype)
    view(V.index(base), dtype, [2, BLOCK, half], flat).index(0).store(mine.to(dtype))
    fence_async_shared()
    thread_barrier()
    tma_store(out, [b, first, h, w * half], staged)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["B", "T"])
def _attention_fwd_hopper_kernel(
    q,  # descriptors: boxes [1, 1, 64, D] of [B, heads, T, D]
    k,
    v,
    out,  # boxes [1, 64, 1, D / 2] of [B, T, H, D]
    lse_ptr,  # fp32 [B * H, pitch]; infinity from T on
    B,
    T,
    lse_pitch,  # a multiple of 64
    c,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: blocks of 64 queries times B * H, those that see most keys first."""
    D: gl.constexpr = q.block_shape[3]
    rank = gl.program_id(0) // (B * H)
    head = gl.program_id(0) - rank * (B * H)
    b = head // H
    h = head - b * H
    kv = h // GROUP
    number = (T + BLOCK - 1) // BLOCK - 1 - rank
    first = number * BLOCK
    Q = gl.allocate_shared_memory(q.dtype, [1] + q.block_shape, q.layout)
    K = gl.allocate_shared_memory(q.dtype, [2 * STAGES] + k.block_shape, k.layout)
    V = gl.allocate_shared_memory(q.dtype, [2 * STAGES] + v.block_shape, v.layout)
    # Of each warpgroup the maxima and the sums.
    ML = gl.allocate_shared_memory(gl.float32, [4, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    merged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    for w in gl.static_range(2):
        mbarrier.init(merged.index(w), count=1)
    begin(0)
    # What the warpgroups wait for first; the rest they request themselves, side by side.
    request(q, b, h, first, q_full, Q.index(0))
    for w in gl.static_range(2):
        # A warpgroup without a block takes zeros from below 0.
        start = (number - w) * BLOCK
        request(k, b, kv, start, k_full.index(w * STAGES), K.index(w * STAGES))
    lse_ptr += head.to(gl.int64) * lse_pitch
    gl.warp_specialize(
        [
            (_attend, (
                0, q, k, v, out, lse_ptr, Q, K, V, ML, q_full, k_full, v_full, merged,
                b, h, kv, first, T, c, D, STAGES,
            )),
            (_attend, (
                1, q, k, v, out, lse_ptr, Q, K, V, ML, q_full, k_full, v_full, merged,
                b, h, kv, first, T, c, D, STAGES,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


def layout_of(block: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory."""
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(block, kind[dtype])


def described(t: Tensor, block: list[int]) -> Any:
    """A descriptor of ``t``, four dimensions, for boxes of this shape."""
    strides = [*strides_of(t), 1]
    return TensorDescriptor(t, list(t.shape), strides, block, layout_of(block, t.dtype))


def head_block(size: int, rows: int = BLOCK.value) -> list[int]:
    """So many rows of a head, of [B, heads, T, D]."""
    return [1, 1, rows, size]


def rows_block(size: int) -> list[int]:
    """64 rows of so many columns of a head, of [B, T, H, D]."""
    return [1, BLOCK.value, 1, size]


def attention_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write ``out`` [B, T, H, D] and ``lse`` fp32 [B * H, T rounded up to 64].

    q [B, H, T, D], k, v [B, K, T, D]: bf16 or fp16 on a Hopper GPU, D 64 or 128, none empty, as
    ``loadable`` returns them.
    """
    batch, heads, tokens, size = q.shape
    programs = -(-tokens // BLOCK.value) * batch * heads
    with on_device(q):
        _attention_fwd_hopper_kernel[(programs,)](
            *(described(t, head_block(size)) for t in (q, k, v)),
            described(out, rows_block(size // 2)),
            lse,
            batch,
            tokens,
            lse.shape[1],
            scale * math.log2(math.e),
            H=heads,
            GROUP=heads // k.shape[1],
            STAGES=STAGES,
            num_warps=4,
            maxnreg=REGISTERS.value,
            launch_pdl=True,
        )

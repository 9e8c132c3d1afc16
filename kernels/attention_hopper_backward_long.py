"""Gradients of causal attention for Hopper and long sequences; formulas are in attention.py.

Five products a block, no score is formed twice. A program has 128 keys of a head and goes through
the blocks of 64 queries that see them; each of its two warpgroups keeps the gradients of 64 keys
and of their values. Scores are transposed, [keys, queries]: p and ds then are left operands, read
from registers. For the gradient of the queries ds goes through shared memory, where both
warpgroups find that of all 128 keys and each forms half of the columns: a part, which is added up
in global memory as integers (attention_fixed_point.py), in any order to the same bits.

A warpgroup forms the part of a turn two turns later, so neither waits for the other as long as they
are less than a turn apart: one multiplies while the other takes exponentials. Within a warpgroup
exponentials run beside the product of dout and values, and parts are added beside the scores.

Query heads that share keys are gone through one after the other by one program, or are programs of
their own, which leave parts, fp32, of the gradients of keys and values.

Why nothing waits for ever. ``turns`` is the same for both warpgroups, 1 or more. What belongs to
turn g lies in slot g % 3, and completes phase g // 3 of that slot's barriers by one arrival each:

- ``x_full`` (queries, lse) and ``y_full`` (dout, delta): turn g is requested if g < turns, once,
  with whole boxes, of which what lies outside the tensors is zero; the first three turns before the
  warpgroups start, turn g + 2 by warpgroup 0 at the end of its turn g, from g = 1 on.
- ``ds_full`` of a warpgroup: near the end of its turn g, when its half of ds is written.
- ``done`` of a warpgroup: near the beginning of its turn g + 1, when it has read slot g of the ring
  and the ds of turn g - 1 for the last time. That of the last turn does not come, nor is it waited
  for.

In its turn g a warpgroup waits for the other one's ``ds_full`` of turn g - 2, if there is such a
turn, to form that part, and for ``done`` of turn g - 2, before ds of g takes the place of that of
g - 3; warpgroup 0 also for ``done`` of turn g - 1, before it fills that slot again. The other one
arrives at the first two in its turns g - 2 and g - 1; at the third at the beginning of its turn g,
once it has had ``ds_full`` of this one's turn g - 2 and the slot of turn g, requested in this one's
turn g - 2. So whoever is behind, in turns and within one, always goes on.

A wait by parity must not come two phases late, when the other one has arrived for a turn three
later. For ``ds_full`` of turn g + 1 it needs this one's ``done`` of turn g - 1, which comes after
the wait for g - 2. ``done`` of g + 1 comes in turn g + 2, which begins with a wait for this one's
``ds_full`` of turn g, later than the wait for ``done`` of g - 2, also where that is for a turn
below 0: for phase -1, which a new barrier has behind it. ``done`` of g + 2 needs the slot of turn
g + 2 to be filled, which is after the wait for ``done`` of g - 1.
"""

from __future__ import annotations

import math

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

from forge.kernels.attention_hopper import (
    BLOCK,
    described,
    exp2,
    head_block,
    product_layout,
    rows_block,
    tile,
)
from forge.kernels.attention_hopper_backward import described_row, row_of, store_rows
from forge.kernels.attention_hopper_sums import add_part, coarse_of
from forge.kernels.hopper_ring import barriers, begin, thread_barrier, tma_load, view
from forge.kernels.runtime import on_device, processors

# Registers a thread: all there are for two warpgroups.
REGISTERS = gl.constexpr(256)
STAGES = gl.constexpr(3)  # slots of queries and dout, and of ds
ROWS = gl.constexpr(2)  # numbers of a query: lse and minus delta


@gluon.jit
def _head(g, count, HEADS: gl.constexpr):
    """Which of a program's heads turn ``g`` is of: g / count, without a division."""
    head = g * 0
    for j in gl.static_range(1, HEADS):
        head += gl.where(g >= j * count, 1, 0)
    return head


@gluon.jit
def _number(g, block, first, count, HEADS: gl.constexpr):
    """The number of the block of queries of turn ``g`` among those of all heads."""
    return block + g + _head(g, count, HEADS) * first


@gluon.jit
def _request_turn(
    i, g, q, dout, lse, minus, R, L, x_full, y_full, head, first, count,
    H: gl.constexpr, HEADS: gl.constexpr, OLD: gl.constexpr, NEW: gl.constexpr,
):  # fmt: skip
    """Fill the slot of turn ``g``: what is older than the kernel in front, the rest, or both."""
    D: gl.constexpr = q.block_shape[3]
    ahead = _head(g, count, HEADS)
    start = (first + g - ahead * count) * BLOCK
    head += ahead
    b = head // H
    h = head - b * H
    x = x_full.index(i)
    y = y_full.index(i)
    layout: gl.constexpr = q.layout
    tiles = view(R.index(i), R.dtype, [2, 1, 1, BLOCK, D], layout)
    bytes: gl.constexpr = BLOCK * D * R.dtype.primitive_bitwidth // 8
    if OLD:
        mbarrier.expect(x, bytes + BLOCK * 4)
        mbarrier.expect(y, bytes + BLOCK * 4)
        tma_load(q, [b, h, start, 0], x, tiles.index(0))
        tma_load(lse, [head, start], x, L.index(ROWS * i))
        tma_load(dout, [b, h, start, 0], y, tiles.index(1))
    if NEW:
        tma_load(minus, [head, start], y, L.index(ROWS * i + 1))


@gluon.jit
def _product(a, b, layout: gl.constexpr):
    """Ask for ``a b^T``, [64, 64], of two tiles."""
    zero = gl.zeros((BLOCK, BLOCK), dtype=gl.float32, layout=layout)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _queries_part(DS, KV, i, w: gl.constexpr, layout: gl.constexpr):
    """Ask for ``ds^T k`` of slot ``i``: 64 queries, of D columns the left or right half."""
    part = gl.zeros((BLOCK, BLOCK), dtype=gl.float32, layout=layout)
    for n in gl.static_range(2):
        columns = tile(KV.index(n), 2 * BLOCK).slice(w * BLOCK, BLOCK, dim=1)
        ds = DS.index(2 * i + n).permute((1, 0))
        part = warpgroup_mma(ds, columns, part, use_acc=n > 0, is_async=True)
    return part


@gluon.jit
def _gradients(
    w: gl.constexpr, q, dout, lse, minus, fine_ptr, sizes_ptr, sums_ptr, dk, dv,
    KV, R, L, N, DS, kv_full, x_full, y_full, ds_mine, ds_theirs, done, done_theirs, ended,
    head, all_kv, first, count, c,
    H: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``w``."""
    dtype: gl.constexpr = R.dtype
    D: gl.constexpr = q.block_shape[3]
    scores: gl.constexpr = product_layout(BLOCK)
    result: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    row = gl.arange(0, BLOCK, layout=rows)

    turns = HEADS * count
    sums_ptr += w * (16 * 128)
    coarse = coarse_of(sizes_ptr, head // GROUP, all_kv, 2 * (first + count))
    block = head * (first + count) + first  # of the first turn
    sum_k = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
    sum_v = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
    ds = gl.zeros((BLOCK, BLOCK), dtype=dtype, layout=operand)
    i = 0  # slot of the turn, and how often it was filled before
    parity = 0
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(x_full.index(0), 0)
    thread_barrier()  # or the compiler puts more of them into the loop
    for g in range(0, turns):
        two_before = gl.where(i == STAGES - 1, 0, i + 1)
        before = gl.where(i == 0, gl.where(g == 0, 0, STAGES - 1), i - 1)
        parity_before = gl.where(two_before == 0, parity, parity ^ 1)  # of two turns before
        tiles = view(R.index(i), dtype, [2, BLOCK, D], matrix)
        # Of the turn before; ds is zero in the first one.
        queries = view(R.index(before), dtype, [2, BLOCK, D], matrix).index(0)
        sum_k = warpgroup_mma(ds, queries, sum_k, is_async=True)
        # Of two turns before; in the first two of whatever is there, and not added.
        mbarrier.wait(ds_theirs.index(two_before), parity_before, pred=g > 1)
        part = _queries_part(DS, KV, two_before, w, scores)
        mbarrier.wait(x_full.index(i), parity)
        s = _product(tile(KV.index(w), D), tiles.index(0), scores)
        number = _number(gl.maximum(g - 2, 0), block, first, count, HEADS)
        fine = gl.load(fine_ptr + number * BLOCK + row)
        sum_k, part, ds = warpgroup_mma_wait(num_outstanding=1, deps=(sum_k, part, ds))
        thread_barrier()
        mbarrier.arrive(done.index(before), count=1, pred=g > 0)
        if g > 1:
            add_part(sums_ptr, number, part, fine * coarse)
        mbarrier.wait(y_full.index(i), parity)
        # dp less delta: the product is added to minus that.
        ds = gl.zeros((BLOCK, BLOCK), dtype=gl.float32, layout=scores)
        ds += row_of(L, ROWS * i + 1, columns)[None, :]
        douts = tiles.index(1).permute((1, 0))
        ds = warpgroup_mma(tile(KV.index(2 + w), D), douts, ds, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p = exp2(s * c - row_of(L, ROWS * i, columns)[None, :])  # 0 from T on: lse is infinite
        n = g - _head(g, count, HEADS) * count
        if n <= w:
            # Numbers from memory: constants would lie in registers all the time.
            query = (n - w) * BLOCK + N.load(columns)
            p = gl.where(row[:, None] <= query[None, :], p, 0.0)
        pb = gl.convert_layout(p.to(dtype), operand)
        sum_v = warpgroup_mma(pb, tiles.index(1), sum_v, is_async=True)
        ds = warpgroup_mma_wait(num_outstanding=1, deps=(ds,))
        ds = (p * ds).to(dtype)
        # The ds of three turns before has been read.
        mbarrier.wait(done_theirs.index(two_before), parity_before)
        DS.index(2 * i + w).store(ds)
        ds = gl.convert_layout(ds, operand)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ds_mine.index(i), count=1)
        if w == 0:
            if (g > 0) & (g + 2 < turns):
                mbarrier.wait(done_theirs.index(before), gl.where(i == 0, parity ^ 1, parity))
                _request_turn(
                    before, g + 2, q, dout, lse, minus, R, L, x_full, y_full,
                    head, first, count, H, HEADS, True, True,
                )  # fmt: skip
        sum_v, pb = warpgroup_mma_wait(num_outstanding=0, deps=(sum_v, pb))
        i = two_before
        parity = parity_before ^ 1
    two_before = gl.where(i == STAGES - 1, 0, i + 1)
    before = gl.where(i == 0, STAGES - 1, i - 1)
    queries = view(R.index(before), dtype, [2, BLOCK, D], matrix).index(0)
    sum_k = warpgroup_mma(ds, queries, sum_k, is_async=True)
    mbarrier.wait(ds_theirs.index(two_before), gl.where(two_before == 0, parity, parity ^ 1))
    part = _queries_part(DS, KV, two_before, w, scores)
    sum_k, part, ds = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k, part, ds))
    if turns > 1:
        number = _number(turns - 2, block, first, count, HEADS)
        add_part(sums_ptr, number, part, gl.load(fine_ptr + number * BLOCK + row) * coarse)
    mbarrier.wait(ds_theirs.index(before), gl.where(i == 0, parity ^ 1, parity))
    part = _queries_part(DS, KV, before, w, scores)
    part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
    number = _number(turns - 1, block, first, count, HEADS)
    add_part(sums_ptr, number, part, gl.load(fine_ptr + number * BLOCK + row) * coarse)

    # Nobody reads shared memory any more: the results go there.
    thread_barrier()
    mbarrier.arrive(ended.index(w), count=1)
    mbarrier.wait(ended.index(1 - w), 0)
    # Of as many bytes as fp32 takes.
    fit: gl.constexpr = 32 // dk.dtype.primitive_bitwidth
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dk.dtype)
    b = head // H
    h = (head - b * H) // HEADS
    r = first + w
    staged = view(R.index(w), dk.dtype, [fit, BLOCK, D], flat)
    store_rows(dv, sum_v, staged, b, r, h, D)
    pair: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK, D], dtype)
    staged = view(KV, dtype, [2, 2 * BLOCK, D], pair).index(w)
    staged = view(staged, dk.dtype, [fit, BLOCK, D], flat)
    store_rows(dk, sum_k * (c * 0.6931471805599453), staged, b, r, h, D)  # c: scale / log(2)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["B", "T"])
def _attention_bwd_hopper_long_kernel(
    q,  # descriptors: boxes [1, 1, 64, D] of [B, heads, T, D]
    k,
    v,
    dout,
    lse,  # boxes [1, 64] of fp32 [B * H, pitch]
    minus,  # of delta
    fine_ptr,  # fp32 [B * H, pitch]
    sizes_ptr,  # int32 [2, B * K, pitch / 32]
    sums_ptr,  # int64 [B * H, pitch / 64, 2, 16, 128]
    dk,  # boxes [1, 64, 1, D] of [B, T, H / HEADS, D]
    dv,
    B,
    T,
    c,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Grid: blocks of 128 keys times B * H / HEADS, those that most queries see first."""
    D: gl.constexpr = q.block_shape[3]
    programs: gl.constexpr = H // HEADS
    rank = gl.program_id(0) // (B * programs)
    head = (gl.program_id(0) - rank * (B * programs)) * HEADS  # the first one
    b = head // H
    kv = (head - b * H) // GROUP
    blocks = (T + BLOCK - 1) // BLOCK
    first = 2 * rank
    count = blocks - first
    turns = HEADS * count
    KV = gl.allocate_shared_memory(q.dtype, [4] + q.block_shape, q.layout)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK, D], q.dtype)
    R = gl.allocate_shared_memory(q.dtype, [STAGES, 2 * BLOCK, D], matrix)
    L = gl.allocate_shared_memory(gl.float32, [ROWS * STAGES] + lse.block_shape, lse.layout)
    N = gl.allocate_shared_memory(gl.int32, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    N.store(numbers.to(gl.int32))
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], q.dtype)
    DS = gl.allocate_shared_memory(q.dtype, [2 * STAGES, BLOCK, BLOCK], square)
    kv_full = barriers(1)
    x_full = barriers(STAGES)
    y_full = barriers(STAGES)
    ds_full0, done0 = barriers(STAGES), barriers(STAGES)  # of either warpgroup
    ds_full1, done1 = barriers(STAGES), barriers(STAGES)
    ended = barriers(2)
    mbarrier.expect(kv_full.index(0), 4 * BLOCK * D * q.dtype.primitive_bitwidth // 8)
    for n in gl.static_range(2):
        tma_load(k, [b, kv, (first + n) * BLOCK, 0], kv_full.index(0), KV.index(n))
        tma_load(v, [b, kv, (first + n) * BLOCK, 0], kv_full.index(0), KV.index(2 + n))
    for g in gl.static_range(STAGES):
        if g < turns:
            _request_turn(
                g, gl.to_tensor(g), q, dout, lse, minus, R, L, x_full, y_full,
                head, first, count, H, HEADS, True, False,
            )  # fmt: skip
    begin(0)
    for g in gl.static_range(STAGES):
        if g < turns:
            _request_turn(
                g, gl.to_tensor(g), q, dout, lse, minus, R, L, x_full, y_full,
                head, first, count, H, HEADS, False, True,
            )  # fmt: skip
    all_kv = B * (H // GROUP)
    gl.warp_specialize(
        [
            (_gradients, (
                0, q, dout, lse, minus, fine_ptr, sizes_ptr, sums_ptr, dk, dv,
                KV, R, L, N, DS, kv_full, x_full, y_full, ds_full0, ds_full1, done0, done1, ended,
                head, all_kv, first, count, c, H, GROUP, HEADS,
            )),
            (_gradients, (
                1, q, dout, lse, minus, fine_ptr, sizes_ptr, sums_ptr, dk, dv,
                KV, R, L, N, DS, kv_full, x_full, y_full, ds_full1, ds_full0, done1, done0, ended,
                head, all_kv, first, count, c, H, GROUP, HEADS,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


def whole_groups(q: Tensor, k: Tensor) -> bool:
    """Whether a program goes through all query heads that share its keys.

    It then leaves whole gradients of them. Where the longest program would take more than its share
    of all work, and in groups of 8, for which registers do not suffice, each head has programs of
    its own, which leave parts.
    """
    batch, heads, tokens, _ = q.shape
    blocks, group = -(-tokens // BLOCK.value), heads // k.shape[1]
    work = batch * heads * (blocks + 1) ** 2 / 4
    return group <= 4 and group * blocks <= 1.1 * work / processors(q)


def attention_backward_long(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    minus: Tensor,
    fine: Tensor,
    sizes: Tensor,
    sums: Tensor,
    scale: float,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write ``dk`` and ``dv`` [B, T, K or H, D], with H of each query head; add to ``sums``.

    Args:
        dout, q: [B, H, T, D], k, v [B, K, T, D], bf16 or fp16 on a Hopper GPU, D 128, none empty,
            as ``loadable`` returns them.
        lse: fp32 [B * H, T rounded up to 64].
        minus, fine, sizes, sums: of :func:`forge.kernels.attention_fixed_point.prepare`, whose
            kernel may be directly in front; all else is older.
        dk, dv: fp32 if they are parts, of the dtype of q otherwise.
    """
    batch, heads, tokens, size = q.shape
    parts, kv_heads = dk.shape[2], k.shape[1]
    with on_device(q):
        _attention_bwd_hopper_long_kernel[(-(-tokens // (2 * BLOCK.value)) * batch * parts,)](
            *(described(t, head_block(size)) for t in (q, k, v, dout)),
            described_row(lse),
            described_row(minus),
            fine,
            sizes,
            sums,
            *(described(t, rows_block(size)) for t in (dk, dv)),
            batch,
            tokens,
            scale * math.log2(math.e),
            H=heads,
            GROUP=heads // kv_heads,
            HEADS=heads // parts,
            num_warps=4,
            maxnreg=REGISTERS.value,
            launch_pdl=True,
        )

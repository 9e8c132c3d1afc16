"""Forward of causal attention for Hopper and long sequences; formulas are in attention.py.

As FlashAttention-3 (Shah et al., arXiv 2407.08608): a tile is 128 queries of a head, two warpgroups
have 64 of them each, and both read the same blocks of 128 keys, from the last one on, which a load
warp brings to a ring. A warpgroup asks for the scores of a block before the product of the block
before with the values, so that exponentials run beside that; and, as nothing ties the warpgroups
together but the ring, also beside the other one's products.

Programs are persistent, one an SM: the load warp goes on to the next tile while the last one ends.
Tiles that see most keys come first, and are dealt out there and back: a program with long ones gets
short ones, too.

Only the first block of a tile may hold keys behind a query, so only there is a mask.

Why nothing waits for ever. All partitions go through the same tiles in the same order, and turns of
the ring are counted on over them: turn g has slot g % STAGES, of K and of V. The load warp fills a
slot once both warpgroups have freed it, which each does once a turn, after its own product with it;
these need nothing but what was loaded earlier. The queries of a warpgroup have one slot, in which
it also leaves its result: freed once a tile, when that is written.
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
    before_next_wait,
    described,
    exp2,
    head_block,
    product_layout,
    request,
    row_max,
    row_sum,
    rows_block,
    tile,
)
from forge.kernels.hopper_ring import barriers, begin, thread_barrier, tma_load, tma_store, view
from forge.kernels.runtime import on_device, processors

KEYS = gl.constexpr(128)  # of a turn
QUERIES = gl.constexpr(128)  # of a tile: BLOCK for each warpgroup
STAGES = 2  # slots of keys, and of values
# Registers a thread of a warpgroup, and of the load warp.
REGISTERS, LOAD_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@gluon.jit
def _tile_of(turn):
    """The program's tile of this turn, if there are so many: there, and back, and so on."""
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, p, programs - 1 - p)


@gluon.jit
def _place(number, B, T, H: gl.constexpr):
    """Of tile ``number``: batch, head and first query."""
    rank = number // (B * H)
    head = number - rank * (B * H)
    b = head // H
    first = ((T + QUERIES - 1) // QUERIES - 1 - rank) * QUERIES
    return b, head - b * H, first


@gluon.jit
def _keys(slot, D: gl.constexpr):
    """A slot of the ring as a matrix [128, D]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], slot.dtype)
    return view(slot, slot.dtype, [KEYS, D], layout)


@gluon.jit
def _load(
    q, k, v, Q, K, V, q_full, k_full, v_full, q_empty, k_empty, v_empty, B, T,
    H: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The load warp."""
    bytes: gl.constexpr = KEYS * k.block_shape[3] * k.dtype.primitive_bitwidth // 8
    tiles = (T + QUERIES - 1) // QUERIES * B * H
    turn = 0
    g = 0
    number = _tile_of(0)
    while number < tiles:
        b, h, first = _place(number, B, T, H)
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            request(q, b, h, first + w * BLOCK, q_full.index(w), Q.index(w))
        for i in range(0, first // KEYS + 1):
            slot = g % STAGES
            free = (g // STAGES & 1) ^ 1
            start = first - i * KEYS
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), bytes)
            tma_load(k, [b, h // GROUP, start, 0], k_full.index(slot), K.index(slot))
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), bytes)
            tma_load(v, [b, h // GROUP, start, 0], v_full.index(slot), V.index(slot))
            g += 1
        turn += 1
        number = _tile_of(turn)


@gluon.jit
def _scores(q, K, g, k_full, D: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr):
    """Ask for the products of the queries with the keys of turn ``g``, [64, 128]."""
    mbarrier.wait(k_full.index(g % STAGES), g // STAGES & 1)
    zero = gl.zeros((BLOCK, KEYS), dtype=gl.float32, layout=layout)
    keys = _keys(K.index(g % STAGES), D).permute((1, 0))
    return warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    w: gl.constexpr, out, lse_ptr, Q, K, V, q_full, k_full, v_full, q_empty, k_empty, v_empty,
    B, T, lse_pitch, c, H: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup ``w``: its 64 queries of every tile."""
    dtype: gl.constexpr = Q.dtype
    scores: gl.constexpr = product_layout(KEYS)
    result: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    query = w * BLOCK + gl.arange(0, BLOCK, layout=rows)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores))
    queries = tile(Q.index(w), D)
    tiles = (T + QUERIES - 1) // QUERIES * B * H
    turn = 0
    g = 0
    number = _tile_of(0)
    while number < tiles:
        b, h, first = _place(number, B, T, H)
        mbarrier.wait(q_full.index(w), turn & 1)
        s = _scores(queries, K, g, k_full, D, STAGES, scores)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_empty.index(g % STAGES), count=1)
        s = gl.where(key[None, :] <= query[:, None], s, float("-inf"))
        m = row_max(s, rows) * c
        p = exp2(s * c - m[:, None])
        total = row_sum(p, rows)
        p = gl.convert_layout(p.to(dtype), operand)
        acc = gl.zeros((BLOCK, D), dtype=gl.float32, layout=result)
        for _ in range(0, first // KEYS):
            before = g % STAGES
            s = _scores(queries, K, g + 1, k_full, D, STAGES, scores)
            mbarrier.wait(v_full.index(before), g // STAGES & 1)
            acc = warpgroup_mma(p, _keys(V.index(before), D), acc, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_empty.index((g + 1) % STAGES), count=1)
            larger = gl.maximum(m, row_max(s, rows) * c)
            r = exp2(s * c - larger[:, None])
            shrink = exp2(m - larger)
            m = larger
            # The exponentials are to run beside the product that is under way.
            total = before_next_wait(total * shrink + row_sum(r, rows))
            r = gl.convert_layout(r.to(dtype), operand)
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, result))[:, None]
            p = r
            g += 1
        before = g % STAGES
        mbarrier.wait(v_full.index(before), g // STAGES & 1)
        acc = warpgroup_mma(p, _keys(V.index(before), D), acc, is_async=True)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        g += 1

        t = first + query
        lse = gl.where(t < T, m + gl.log2(total), float("inf"))
        head = b * H + h
        gl.store(lse_ptr + head.to(gl.int64) * lse_pitch + t, lse, mask=t < lse_pitch)
        acc = acc * gl.convert_layout(1 / total, gl.SliceLayout(1, result))[:, None]
        # All its scores are there: nobody reads the queries any more.
        view(Q.index(w), dtype, [BLOCK, D], matrix).store(acc.to(dtype))
        fence_async_shared()
        thread_barrier()
        box: gl.constexpr = out.layout
        staged = view(Q.index(w), dtype, [1, BLOCK, 1, D], box)
        tma_store(out, [b, first + w * BLOCK, h, 0], staged)
        tma.store_wait(pendings=0)
        mbarrier.arrive(q_empty.index(w), count=1)
        turn += 1
        number = _tile_of(turn)


@gluon.jit(do_not_specialize=["B", "T"])
def _attention_fwd_hopper_long_kernel(
    q,  # descriptors: boxes [1, 1, 64, D] of [B, heads, T, D]
    k,  # boxes [1, 1, 128, D]
    v,
    out,  # boxes [1, 64, 1, D] of [B, T, H, D]
    lse_ptr,  # fp32 [B * H, pitch]; infinity from T on
    B,
    T,
    lse_pitch,  # a multiple of 64
    c,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: at most a program an SM."""
    D: gl.constexpr = q.block_shape[3]
    Q = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    K = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout)
    V = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_shape, v.layout)
    q_full, q_empty = barriers(2), barriers(2)
    k_full, k_empty = barriers(STAGES), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES), barriers(STAGES, 2)
    begin(0)
    gl.warp_specialize(
        [
            (_attend, (
                0, out, lse_ptr, Q, K, V, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                B, T, lse_pitch, c, H, D, STAGES,
            )),
            (_attend, (
                1, out, lse_ptr, Q, K, V, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                B, T, lse_pitch, c, H, D, STAGES,
            )),
            (_load, (
                q, k, v, Q, K, V, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                B, T, H, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def attention_forward_hopper_long(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write ``out`` [B, T, H, D] and ``lse`` fp32 [B * H, T rounded up to 64].

    q [B, H, T, D], k, v [B, K, T, D]: bf16 or fp16 on a Hopper GPU, D 64 or 128, none empty, as
    ``loadable`` returns them.
    """
    batch, heads, tokens, size = q.shape
    tiles = -(-tokens // QUERIES.value) * batch * heads
    with on_device(q):
        _attention_fwd_hopper_long_kernel[(min(tiles, processors(q)),)](
            described(q, head_block(size)),
            *(described(t, head_block(size, KEYS.value)) for t in (k, v)),
            described(out, rows_block(size)),
            lse,
            batch,
            tokens,
            lse.shape[1],
            scale * math.log2(math.e),
            H=heads,
            GROUP=heads // k.shape[1],
            STAGES=STAGES,
            num_warps=4,
            launch_pdl=True,
        )

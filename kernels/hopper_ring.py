"""What the fused updates for Hopper share: a ring of slots in shared memory, and who fills it.

Persistent, one program an SM, tiles of 128 x 256, eight math warps, one load warp, one store warp.
One ring of four slots of 48 KB: a slot holds dY | X of one step of 64 tokens, or a part of the
tile's weights and states (at most the same bytes), so the states are requested while the last steps
are multiplied, and the next tile's operands while the update runs. The math warps update a part in
place in its slot; only the store warp waits for stores.

A slot is two pieces, P of 16 KB and Q of 32 KB. Each has a barrier ``full`` (loaded) and ``empty``
(may be loaded again); ``done`` counts the updated parts, which the store warp waits for. Which part
lies where is up to ``_load_group`` and ``_store_group``. kernels/hopper_pair.py and
kernels/hopper_apart.py have rings of their own, for tiles of 128 x 128.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from forge.kernels.runtime import Dual

# Matrices a launch: with more, its arguments pass 4 KB, which costs 0.3 ms in 1.6.
GROUPS = gl.constexpr(4)
# Tokens a step; rows and columns of a tile of dW; columns of it updated at a time.
BM, BN, BK, CHUNK = gl.constexpr(64), gl.constexpr(128), gl.constexpr(256), gl.constexpr(64)
SLOTS = gl.constexpr(4)
# Barriers that count updated parts. No more parts than these wait for their stores at a time: one
# more would lie in slots that the store warp has not freed.
DONES = gl.constexpr(4)
# Parts of a tile, a slot each. With bf16 states each is w and both states of 64 columns. With codes
# w of columns 0 to 63 and both states of 0 to 127; w of 64 to 191; w of 192 to 255 and both states
# of 128 to 255.
PARTS = gl.constexpr(4)
CODE_PARTS = gl.constexpr(3)

# Renamed after Triton 3.6.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


# Of dY, X, w and both states as the tensor memory engine copies them.
BLOCKS = (
    [BM.value, BN.value],
    [BM.value, BK.value],
    *([[BN.value, CHUNK.value]] * 3),
)
LAYOUTS = tuple(gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16) for block in BLOCKS)


@gluon.jit
def _where(condition, x, y):
    return gl.where(condition, x, y)


@gluon.jit
def _sign(x):
    return gl.where(x > 0, 1.0, gl.where(x < 0, -1.0, 0.0))


@gluon.jit
def _sqrt(x):
    return gl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _divide(x, y):
    # One unit in the last place from the true quotient, where both are normal numbers.
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1
    )
    return x * inverse


@gluon.jit
def _bits_of(x):
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def _float_of(bits):
    return bits.to(gl.float32, bitcast=True)


@cache
def gluon_function(dual: Dual) -> Any:
    """The function for Gluon: the same source with Gluon's names."""
    fn = dual.torch
    names = {**fn.__globals__, "sqrt": _sqrt, "divide": _divide, "where": _where}
    names |= {"sign": _sign, "bits_of": _bits_of, "float_of": _float_of, "gl": gl}
    return gluon.jit(types.FunctionType(fn.__code__, names, fn.__name__))


@gluon.jit
def widen(x):
    """bf16 to fp32, two neighbours in two instructions: the compiler takes four."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory as an array of another type and shape."""
    if _PUBLIC:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def halves(x):
    """Left and right half of the columns: registers only."""
    a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return a, b


@gluon.jit
def row_halves(x):
    """Upper and lower half of the rows: registers only, with a warp for each 32 rows."""
    a, b = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute((1, 2, 0)).split()
    return a, b


@gluon.jit
def chunk_views(P, Q, layout: gl.constexpr):
    """In the two pieces of a slot: w [128, 64] and two more arrays as large, bf16.

    With bf16 states they are those of the same 64 columns. With codes they are the codes of 128
    columns, two a number, or the one is w of the next 64 columns.
    """
    pair = view(Q, gl.bfloat16, [2, BN, CHUNK], layout)
    return view(P, gl.bfloat16, [BN, CHUNK], layout), pair.index(0), pair.index(1)


@gluon.jit
def place_of(it, slots: gl.constexpr):
    """Slot of turn ``it``, and the parity of how often it was taken before."""
    turn = it.to(gl.uint32)
    return (turn % slots).to(gl.int32), ((turn // slots) & 1).to(gl.int32)


@gluon.jit
def claim(it, bytes: gl.constexpr, full, empty):
    """The slot of turn ``it``, once it is empty; the math warps will wait for ``bytes`` in it."""
    i, parity = place_of(it, full.shape[0])
    mbarrier.wait(empty.index(i), parity ^ 1)
    mbarrier.expect(full.index(i), bytes)
    return i


@gluon.jit
def wait_full(it, full):
    """The slot of turn ``it``, once it is loaded."""
    i, parity = place_of(it, full.shape[0])
    mbarrier.wait(full.index(i), parity)
    return i


@gluon.jit
def _load_group(
    dy, x, w, s0, s1, tile, first, end, it, M, tiles_k, P, Q, full, empty, CODES: gl.constexpr
):
    """Request operands and states of this program's tiles of one matrix."""
    layout: gl.constexpr = w.layout
    array: gl.constexpr = BN * CHUNK * 2
    while tile < end:
        row = (tile - first) // tiles_k * BN
        column = (tile - first) % tiles_k * BK
        for m in range(0, M, BM):
            i = claim(it, BM * (BN + BK) * 2, full, empty)
            tma_load(dy, [m, row], full.index(i), P.index(i))
            tma_load(x, [m, column], full.index(i), Q.index(i))
            it += 1
        for c in gl.static_range(CODE_PARTS if CODES else PARTS):
            at = column + c * CHUNK
            if not CODES:
                i = claim(it, 3 * array, full, empty)
                a, b, d = chunk_views(P.index(i), Q.index(i), layout)
                tma_load(w, [row, at], full.index(i), a)
                tma_load(s0, [row, at], full.index(i), b)
                tma_load(s1, [row, at], full.index(i), d)
            elif c == 1:
                i = claim(it, 2 * array, full, empty)
                a, b, d = chunk_views(P.index(i), Q.index(i), layout)
                tma_load(w, [row, at], full.index(i), a)
                tma_load(w, [row, at + CHUNK], full.index(i), b)
            else:
                i = claim(it, 3 * array, full, empty)
                a, b, d = chunk_views(P.index(i), Q.index(i), layout)
                tma_load(w, [row, column + c // 2 * 3 * CHUNK], full.index(i), a)
                tma_load(s0, [row, at // 2], full.index(i), b)
                tma_load(s1, [row, at // 2], full.index(i), d)
            it += 1
        tile += gl.num_programs(0)
    return tile, it


@gluon.jit
def loader(dy, x, w, s0, s1, ends, across, M, P, Q, full, empty, CODES: gl.constexpr):
    """The load warp."""
    tile = gl.program_id(0)
    it = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        tile, it = _load_group(
            dy[j], x[j], w[j], s0[j], s1[j], tile, first, ends[j], it, M, across[j],
            P, Q, full, empty, CODES,
        )  # fmt: skip


@gluon.jit
def _store_group(
    w, s0, s1, tile, first, end, n, M, tiles_k, P, Q, done, empty, CODES: gl.constexpr
):
    """Write back the updated parts of this program's tiles of one matrix; free their slots."""
    layout: gl.constexpr = w.layout
    parts: gl.constexpr = CODE_PARTS if CODES else PARTS
    steps = (M + BM - 1) // BM
    while tile < end:
        row = (tile - first) // tiles_k * BN
        column = (tile - first) % tiles_k * BK
        for c in gl.static_range(parts):
            i = (n * (steps + parts) + steps + c) % SLOTS
            count = n * parts + c
            mbarrier.wait(done.index(count % DONES), (count // DONES) & 1)
            at = column + c * CHUNK
            a, b, d = chunk_views(P.index(i), Q.index(i), layout)
            if not CODES:
                tma_store(w, [row, at], a)
                tma_store(s0, [row, at], b)
                tma_store(s1, [row, at], d)
            elif c == 1:
                tma_store(w, [row, at], a)
                tma_store(w, [row, at + CHUNK], b)
            else:
                tma_store(w, [row, column + c // 2 * 3 * CHUNK], a)
                tma_store(s0, [row, at // 2], b)
                tma_store(s1, [row, at // 2], d)
            tma.store_wait(pendings=0)
            mbarrier.arrive(empty.index(i), count=1)
        n += 1
        tile += gl.num_programs(0)
    return tile, n


@gluon.jit
def storer(w, s0, s1, ends, across, M, P, Q, done, empty, CODES: gl.constexpr):
    """The store warp."""
    tile = gl.program_id(0)
    n = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        tile, n = _store_group(
            w[j], s0[j], s1[j], tile, first, ends[j], n, M, across[j], P, Q, done, empty, CODES
        )


@gluon.jit
def multiply(it, M, P, Q, full, empty):
    """The tile of dW, fp32, from the slots of turn ``it`` on; and the turn after.

    A warp for each 32 columns. Frees the slots: each is read to its end when the next product has
    been asked for and all but that one are complete.
    """
    slots: gl.constexpr = P.shape[0]
    tokens: gl.constexpr = P.shape[1]
    rows: gl.constexpr = P.shape[2]
    columns: gl.constexpr = Q.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[columns // 32, 1], instr_shape=[16, columns, 16]
    )
    acc = gl.zeros((rows, columns), dtype=gl.float32, layout=mma)
    for m in range(0, M, tokens):
        i = wait_full(it, full)
        acc = warpgroup_mma(P.index(i).permute((1, 0)), Q.index(i), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        before, _ = place_of(it + slots - 1, slots)
        mbarrier.arrive(empty.index(before), count=1, pred=m > 0)
        it += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    before, _ = place_of(it + slots - 1, slots)
    mbarrier.arrive(empty.index(before), count=1, pred=M > 0)
    return acc, it


@gluon.jit
def load_scalars(scalars_ptr, seed_ptr, SCALARS: gl.constexpr):
    """The scalars of a rule, and the seed."""
    scalars = ()
    for j in gl.static_range(SCALARS):
        scalars = scalars + (gl.load(scalars_ptr + j),)
    return scalars, gl.load(seed_ptr).to(gl.uint32)


@gluon.jit
def place(tile, ends, across, salts):
    """Of the matrix with this tile: its first tile, tiles across a row, salt."""
    first = 0
    tk = across[0]
    salt = salts[0]
    for j in gl.static_range(1, GROUPS):
        beyond = tile >= ends[j - 1]
        first = gl.where(beyond, ends[j - 1], first)
        tk = gl.where(beyond, across[j], tk)
        salt = gl.where(beyond, salts[j], salt)
    return first, tk, salt


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr = 1):
    """So many barriers that so many arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def allocate(
    tokens: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, slots: gl.constexpr, dy, x
):
    """The ring and its barriers, for operands described like ``dy`` and ``x``."""
    P = gl.allocate_shared_memory(gl.bfloat16, [slots, tokens, rows], dy.layout)
    Q = gl.allocate_shared_memory(gl.bfloat16, [slots, tokens, columns], x.layout)
    full, empty, done = barriers(slots), barriers(slots), barriers(DONES)
    return P, Q, full, empty, done


@gluon.jit
def wait_for_launches_in_front():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin(behind):
    """Begin the kernel in a chain of launches, of which it is number ``behind``.

    Launches overlap (programmatic dependent launch): the next one may take each SM as it becomes
    free. The first of a chain reads nothing before the kernels in front of it, which wrote its
    operands, have ended, and lets no other start before that; so those behind it, whose operands
    are as old, need not wait. They wait at their end: a kernel that follows the chain waits for
    the last launch alone.
    """
    if behind == 0:
        wait_for_launches_in_front()
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )

"""Two programs an SM for the fused updates on Hopper: while one multiplies, the other updates.

As kernels/hopper_ring.py, but a program has four math warps and tiles of 128 x 128, and half of an
SM's registers and shared memory, so that two of them run there. They know nothing of each other:
the hardware gives each what the other leaves, and a launch's next program takes the place of one
that has ended beside one that has not (a chain of launches has no tail). Operands are read more
often than with tiles of 128 x 256; for many tokens, when the product takes longer than the update,
that is slower.

The ring has seven slots of two pieces of 8 KB. A slot holds dY | X of one step of 32 tokens; or of
an upper or lower half of the tile, [64, 128], the left and right half of w; or the same of a bf16
state; or the codes of both states. A half is one part: w and both states in three slots, with codes
in two.

Why nothing waits for ever. All warps go through the same tiles and turns: a tile takes ceil(M / 32)
turns for products and then 6 (4) for states, each turn one slot, in the order of the ring. Of every
turn the load warp arrives once at ``full`` (with 16 KB; a box beyond the matrix counts in full, its
elements are zero), and exactly one warp arrives once at ``empty``: the math warps after a product,
the store warp after a store. So each barrier completes one phase a turn, and nobody is more than
one phase away from who waits for him: turn t + 7 is claimed only after turn t is freed. ``done``:
two parts four apart are at least 8 turns apart, so the later one is loaded only after the store
warp has seen the earlier one. A part takes at most 3 of the 7 slots, and what is before it in the
ring is freed without it. A program without a tile waits for nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from forge.kernels.hopper_ring import DONES, GROUPS, claim, place_of, tma_load, tma_store, view

# Tokens a step; rows and columns of a tile; rows of a part, rows and columns of a piece.
PAIR_BM, PAIR_BK, HALF = gl.constexpr(32), gl.constexpr(128), gl.constexpr(64)
PAIR_BN = gl.constexpr(128)
PAIR_SLOTS = gl.constexpr(7)
# Slots of a part, with bf16 states and with codes.
PART, CODE_PART = gl.constexpr(3), gl.constexpr(2)
# Registers a thread at launch: 256 threads are paid for, of two programs.
PAIR_REGISTERS = 128

# Of dY, X, w and both states as the tensor memory engine copies them.
PAIR_BLOCKS = (
    [PAIR_BM.value, PAIR_BN.value],
    [PAIR_BM.value, PAIR_BK.value],
    *([[HALF.value, HALF.value]] * 3),
)
PAIR_LAYOUTS = tuple(
    gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16) for block in PAIR_BLOCKS
)
# How a piece lies in shared memory.
PIECE = gl.constexpr(PAIR_LAYOUTS[2])


@gluon.jit
def pieces(P, Q, i):
    """Both pieces of slot ``i`` as [64, 64] of 16 bits."""
    left = view(P.index(i), gl.bfloat16, [HALF, HALF], PIECE)
    return left, view(Q.index(i), gl.bfloat16, [HALF, HALF], PIECE)


@gluon.jit
def _load_halves(x, row, column, it, P, Q, full, empty):
    i = claim(it, 2 * HALF * HALF * 2, full, empty)
    left, right = pieces(P, Q, i)
    tma_load(x, [row, column], full.index(i), left)
    tma_load(x, [row, column + HALF], full.index(i), right)
    return it + 1


@gluon.jit
def load_steps(dy, x, row, column, it, M, P, Q, full, empty):
    """Request the operands of a tile; the turn after."""
    for m in range(0, M, PAIR_BM):
        i = claim(it, PAIR_BM * (PAIR_BN + PAIR_BK) * 2, full, empty)
        tma_load(dy, [m, row], full.index(i), P.index(i))
        tma_load(x, [m, column], full.index(i), Q.index(i))
        it += 1
    return it


@gluon.jit
def _load_group(
    dy, x, w, s0, s1, tile, first, end, it, M, tiles_k, P, Q, full, empty, CODES: gl.constexpr
):
    """Request operands and states of this program's tiles of one matrix."""
    while tile < end:
        row = (tile - first) // tiles_k * PAIR_BN
        column = (tile - first) % tiles_k * PAIR_BK
        it = load_steps(dy, x, row, column, it, M, P, Q, full, empty)
        for half in gl.static_range(2):
            at = row + half * HALF
            it = _load_halves(w, at, column, it, P, Q, full, empty)
            if CODES:
                i = claim(it, 2 * HALF * HALF * 2, full, empty)
                a, b = pieces(P, Q, i)
                tma_load(s0, [at, column // 2], full.index(i), a)
                tma_load(s1, [at, column // 2], full.index(i), b)
                it += 1
            else:
                it = _load_halves(s0, at, column, it, P, Q, full, empty)
                it = _load_halves(s1, at, column, it, P, Q, full, empty)
        tile += gl.num_programs(0)
    return tile, it


@gluon.jit
def _sleep(nanoseconds):
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; // $0", "=r,r", [nanoseconds], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pair_loader(
    dy, x, w, s0, s1, ends, across, M, delay, P, Q, full, empty, CODES: gl.constexpr
):  # fmt: skip
    """The load warp. ``delay``, ns: how much later the second half of the programs begins."""
    # Two programs of an SM that are in step stay in step: both multiply, then both update.
    if 2 * gl.program_id(0) >= gl.num_programs(0):
        _sleep(delay)
    tile = gl.program_id(0)
    it = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        tile, it = _load_group(
            dy[j], x[j], w[j], s0[j], s1[j], tile, first, ends[j], it, M, across[j],
            P, Q, full, empty, CODES,
        )  # fmt: skip


@gluon.jit
def _store_halves(x, row, column, it, P, Q):
    i, _ = place_of(it, PAIR_SLOTS)
    left, right = pieces(P, Q, i)
    tma_store(x, [row, column], left)
    tma_store(x, [row, column + HALF], right)


@gluon.jit
def _store_group(
    w, s0, s1, tile, first, end, n, M, tiles_k, P, Q, done, empty, CODES: gl.constexpr
):
    """Write back the updated parts of this program's tiles of one matrix; free their slots."""
    part: gl.constexpr = CODE_PART if CODES else PART
    steps = (M + PAIR_BM - 1) // PAIR_BM
    while tile < end:
        row = (tile - first) // tiles_k * PAIR_BN
        column = (tile - first) % tiles_k * PAIR_BK
        for half in gl.static_range(2):
            it = n * (steps + 2 * part) + steps + half * part
            count = 2 * n + half
            mbarrier.wait(done.index(count % DONES), (count // DONES) & 1)
            at = row + half * HALF
            _store_halves(w, at, column, it, P, Q)
            if CODES:
                i, _ = place_of(it + 1, PAIR_SLOTS)
                a, b = pieces(P, Q, i)
                tma_store(s0, [at, column // 2], a)
                tma_store(s1, [at, column // 2], b)
            else:
                _store_halves(s0, at, column, it + 1, P, Q)
                _store_halves(s1, at, column, it + 2, P, Q)
            tma.store_wait(pendings=0)
            for c in gl.static_range(part):
                i, _ = place_of(it + c, PAIR_SLOTS)
                mbarrier.arrive(empty.index(i), count=1)
        n += 1
        tile += gl.num_programs(0)
    return tile, n


@gluon.jit
def pair_storer(w, s0, s1, ends, across, M, P, Q, done, empty, CODES: gl.constexpr):
    """The store warp."""
    tile = gl.program_id(0)
    n = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        tile, n = _store_group(
            w[j], s0[j], s1[j], tile, first, ends[j], n, M, across[j], P, Q, done, empty, CODES
        )

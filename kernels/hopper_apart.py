"""Warps that multiply and warps that update, apart, for the fused int8 updates on Hopper.

One program an SM, tiles of 128 x 128 as in kernels/hopper_pair.py, five kinds of warps: four warps
multiply, eight update, one loads operands, one loads weights and states, one stores them. So
products and updates overlap all the time, and no accumulators take registers from the update.

The gradient of half a tile, [64, 128], goes through shared memory in fp32. A lane that multiplies
holds what one lane that updates needs, the same columns of a row; so it lies there lane by lane,
and neither side has bank conflicts. The update takes it into registers at once and frees it: one
half is enough for both sides to work, and a tile is multiplied while the one before is updated.

Shared memory: six slots of 16 KB of operands (dY | X of one step of 32 tokens); three of 32 KB of w
and states of half a tile; 32 KB of gradient: 224 KB. Two rings, because operands must not wait for
the updates of the tile before.

With bf16 states, whose update takes few instructions, this was slower than kernels/hopper_pair.py
(results/LOG.md).

Why nothing waits for ever. All warps go through the same halves of the same tiles, in order; half t
of a program is turn t of everything but the operands. Each barrier has one kind of warp that
arrives, once a turn of its slot:

    operands  full: operand loader (and its bytes)   empty: multiplying warps
    states    full: state loader (and its bytes)     empty: storing warp
    gradient  full: multiplying warps                empty: updating warps
    done      updating warps, for the storing warp

Who arrives at ``full`` of a turn has waited for ``empty`` of the turn before in that slot, and the
other way round; so nobody is more than one phase away from who waits. ``done`` has four barriers
and the states three slots: turn t + 4 is loaded only after the storing warp has seen turn
t. Loaders wait only for who frees their own ring; multiplying warps for operands and for the
update before; the update for both and for states; the storing warp for the update: no circle. A
program without a tile waits for nothing. With one token a tile is one step, of zeros but for a row;
what lies beyond a matrix is loaded as zeros, counts in full and is not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from forge.kernels.hopper_codes import rows_layout
from forge.kernels.hopper_pair import HALF, PAIR_BK, PAIR_BN, PIECE, load_steps
from forge.kernels.hopper_ring import (
    DONES,
    GROUPS,
    barriers,
    claim,
    multiply,
    place_of,
    row_halves,
    thread_barrier,
    tma_load,
    tma_store,
)

# Slots of operands; of weights and states.
APART_SLOTS, CODE_SLOTS = gl.constexpr(6), gl.constexpr(3)
# Pieces of 64 x 64 numbers of 16 bits in a slot of weights and states: left and right half of w,
# then the codes of both states, two a number.
CODE_PIECES = gl.constexpr(4)
# Warps and registers a thread of the partitions behind the eight warps that update, which get 160
# of what 16 warps have: 128 each at launch.
WORKER_WARPS = gl.constexpr([4, 1, 1, 1])
WORKER_REGISTERS = gl.constexpr([168, 24, 24, 24])

# Half a gradient lies as [eight rows, eight columns, row, two columns, column].
_GRADIENT = gl.constexpr([8, 16, 8, 4, 2])
_GRADIENT_SMEM = gl.constexpr(
    gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[4, 3, 2, 1, 0])
)
# Of it in the warps that update: eight rows a warp, a row in four lanes.
_GRADIENT_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1]] + [[0, c, 0, 0, 0] for c in (1, 2, 4, 8)],
        lane_bases=[[0, 0, 0, c, 0] for c in (1, 2)] + [[0, 0, r, 0, 0] for r in (1, 2, 4)],
        warp_bases=[[w, 0, 0, 0, 0] for w in (1, 2, 4)],
        block_bases=[],
        shape=_GRADIENT.value,
    )
)


@gluon.jit
def allocate_states():
    """Slots of weights and states with their barriers; half a gradient with its own."""
    S = gl.allocate_shared_memory(gl.bfloat16, [CODE_SLOTS * CODE_PIECES, HALF, HALF], PIECE)
    G = gl.allocate_shared_memory(gl.float32, _GRADIENT, _GRADIENT_SMEM)
    return S, barriers(CODE_SLOTS), barriers(CODE_SLOTS), G, barriers(1), barriers(1)


@gluon.jit
def operand_loader(dy, x, ends, across, M, P, Q, full, empty):
    """The warp that loads operands."""
    tile = gl.program_id(0)
    it = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        while tile < ends[j]:
            row = (tile - first) // across[j] * PAIR_BN
            column = (tile - first) % across[j] * PAIR_BK
            it = load_steps(dy[j], x[j], row, column, it, M, P, Q, full, empty)
            tile += gl.num_programs(0)


@gluon.jit
def state_loader(w, s0, s1, ends, across, S, full, empty):
    """The warp that loads weights and states."""
    tile = gl.program_id(0)
    it = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        while tile < ends[j]:
            row = (tile - first) // across[j] * PAIR_BN
            column = (tile - first) % across[j] * PAIR_BK
            for half in range(2):
                i = claim(it, CODE_PIECES * HALF * HALF * 2, full, empty)
                at = row + half * HALF
                k = i * CODE_PIECES
                bar = full.index(i)
                tma_load(w[j], [at, column], bar, S.index(k))
                tma_load(w[j], [at, column + HALF], bar, S.index(k + 1))
                tma_load(s0[j], [at, column // 2], bar, S.index(k + 2))
                tma_load(s1[j], [at, column // 2], bar, S.index(k + 3))
                it += 1
            tile += gl.num_programs(0)


@gluon.jit
def apart_storer(w, s0, s1, ends, across, S, empty, done):
    """The warp that stores weights and states, and frees their slots."""
    tile = gl.program_id(0)
    it = 0
    for j in gl.static_range(GROUPS):
        first = ends[j - 1] if j > 0 else 0
        while tile < ends[j]:
            row = (tile - first) // across[j] * PAIR_BN
            column = (tile - first) % across[j] * PAIR_BK
            for half in range(2):
                mbarrier.wait(done.index(it % DONES), (it // DONES) & 1)
                i, _ = place_of(it, empty.shape[0])
                at = row + half * HALF
                k = i * CODE_PIECES
                tma_store(w[j], [at, column], S.index(k))
                tma_store(w[j], [at, column + HALF], S.index(k + 1))
                tma_store(s0[j], [at, column // 2], S.index(k + 2))
                tma_store(s1[j], [at, column // 2], S.index(k + 3))
                tma.store_wait(pendings=0)
                mbarrier.arrive(empty.index(i), count=1)
                it += 1
            tile += gl.num_programs(0)


@gluon.jit
def multiplier(ends, M, P, Q, full, empty, G, given, taken):
    """The warps that multiply, and give the gradient."""
    it = 0
    for _ in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        acc, it = multiply(it, M, P, Q, full, empty)
        rows = row_halves(acc)
        for half in gl.static_range(2):
            # Turns of one slot, two a tile: their parity is that of the half.
            mbarrier.wait(taken.index(0), 1 - half)
            x = rows[half].reshape([8, 8, 16, 4, 2]).permute((0, 2, 1, 3, 4))
            G.store(x)
            thread_barrier()
            mbarrier.arrive(given.index(0), count=1)


@gluon.jit
def take_gradient(it, G, given, taken):
    """The gradient of the half of turn ``it``, fp32 [64, 128], in the warps that update."""
    mbarrier.wait(given.index(0), it & 1)
    x = G.load(_GRADIENT_LAYOUT)
    # All have read it.
    thread_barrier()
    mbarrier.arrive(taken.index(0), count=1)
    layout: gl.constexpr = rows_layout(8, 128, 2)
    x = x.permute((0, 2, 1, 3, 4)).reshape([HALF, PAIR_BK])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def finish(it, done):
    """Hand the updated half of turn ``it`` to the storing warp."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(done.index(it % DONES), count=1)

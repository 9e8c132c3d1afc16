"""The fused update for Hopper with 8-bit states: kernels/wgrad_update_hopper.py launches it.

States are codes [N, K], int8 or uint8, with exponents [N, K / 128], uint8 (kernels/block_code.py).
Both are updated as by kernels/apply_rule.py, with the same random bits, in units of rows
(kernels/hopper_codes.py). The exponents of a tile are read before they are needed: before it is
multiplied, or while the tile before is updated.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from forge.kernels.hopper_apart import (
    APART_SLOTS,
    CODE_PIECES,
    WORKER_REGISTERS,
    WORKER_WARPS,
    allocate_states,
    apart_storer,
    finish,
    multiplier,
    operand_loader,
    state_loader,
    take_gradient,
)
from forge.kernels.hopper_codes import (
    constants,
    unit_layout,
    unit_rows,
    units,
    update_unit,
)
from forge.kernels.hopper_pair import (
    CODE_PART,
    HALF,
    PAIR_BK,
    PAIR_BM,
    PAIR_BN,
    PAIR_SLOTS,
    pair_loader,
    pair_storer,
    pieces,
)
from forge.kernels.hopper_ring import (
    BK,
    BM,
    BN,
    CODE_PARTS,
    DONES,
    GROUPS,
    SLOTS,
    allocate,
    begin,
    chunk_views,
    halves,
    load_scalars,
    loader,
    multiply,
    place,
    row_halves,
    storer,
    thread_barrier,
    wait_for_launches_in_front,
    wait_full,
)

# The exponents of several blocks are one int32, a byte each.


@gluon.jit
def _byte(exponents, b: gl.constexpr):
    return (exponents >> 8 * b) & 0xFF


@gluon.jit
def _with_byte(exponents, b: gl.constexpr, exponent):
    others: gl.constexpr = 0xFFFFFF if b == 3 else -1 - (0xFF << 8 * b)
    return (exponents & others) | exponent << 8 * b


@gluon.jit
def _of_tile(tile, ends, across, heights, scales0, scales1):
    """Of the matrix with this tile: its first tile, tiles across, height, exponents."""
    first = 0
    tk = across[0]
    height = heights[0]
    p0 = scales0[0]
    p1 = scales1[0]
    for j in gl.static_range(1, GROUPS):
        beyond = tile >= ends[j - 1]
        first = gl.where(beyond, ends[j - 1], first)
        tk = gl.where(beyond, across[j], tk)
        height = gl.where(beyond, heights[j], height)
        p0 = gl.where(beyond, scales0[j], p0)
        p1 = gl.where(beyond, scales1[j], p1)
    return first, tk, height, p0, p1


@gluon.jit
def _again(x):
    """``x``, of which the compiler does not know that it is."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _scales(
    tile, ends, across, heights, scales0, scales1,
    unit: gl.constexpr, units: gl.constexpr, row, rows: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Where exponents of a unit's rows lie, of both states; which rows exist.

    Its memory, of ``units``, begins at ``row`` of the tile, which has ``rows``.
    """
    first, tk, height, p0, p1 = _of_tile(tile, ends, across, heights, scales0, scales1)
    at = unit_rows(W, unit, units) + (row + (tile - first) // tk * rows)
    offset = at * tk + (tile - first) % tk
    return p0 + offset, p1 + offset, at < height


@gluon.jit
def _math(
    P, Q, full, empty, done, ends, across, salts, heights, scales0, scales1, M,
    scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr, smem: gl.constexpr,
):  # fmt: skip
    scalars, seed = load_scalars(scalars_ptr, seed_ptr, SCALARS)
    kept = constants(seed)
    it = 0
    n = 0
    for tile in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        # The exponents of both blocks are one number. They are here when they are needed.
        p0, p1, inside = _scales(tile, ends, across, heights, scales0, scales1, 0, 2, 0, BN, 8)
        e00 = gl.load(p0, mask=inside, other=0).to(gl.int32)
        e10 = gl.load(p1, mask=inside, other=0).to(gl.int32)
        p0, p1, inside = _scales(tile, ends, across, heights, scales0, scales1, 1, 2, 0, BN, 8)
        e01 = gl.load(p0, mask=inside, other=0).to(gl.int32)
        e11 = gl.load(p1, mask=inside, other=0).to(gl.int32)
        acc, it = multiply(it, M, P, Q, full, empty)
        # From the tile's number again: addresses are not kept while it is multiplied.
        same = _again(tile)
        first, tk, salt = place(same, ends, across, salts)
        pitch = tk * BK
        base = (same - first) // tk * BN * pitch + (same - first) % tk * BK + salt
        blocks = halves(acc)
        middle = (it + 1) % SLOTS
        w1, w2, _ = chunk_views(P.index(middle), Q.index(middle), smem)
        for b in gl.static_range(2):
            i = wait_full(it + 2 * b, full)
            w0, m, v = chunk_views(P.index(i), Q.index(i), smem)
            left, right = (w0, w1) if b == 0 else (w2, w0)
            if b == 0:
                wait_full(it + 1, full)
            g0, g1 = units(blocks[b])
            f0, f1 = update_unit(
                g0, m, v, left, right, 0, (_byte(e00, b), _byte(e10, b)),
                b * 128, base, pitch, seed, kept, scalars, RULE, STOCHASTIC,
            )  # fmt: skip
            e00 = _with_byte(e00, b, f0)
            e10 = _with_byte(e10, b, f1)
            # Else the compiler mixes both units, for which the registers do not suffice.
            thread_barrier()
            f0, f1 = update_unit(
                g1, m, v, left, right, 1, (_byte(e01, b), _byte(e11, b)),
                b * 128, base, pitch, seed, kept, scalars, RULE, STOCHASTIC,
            )  # fmt: skip
            e01 = _with_byte(e01, b, f0)
            e11 = _with_byte(e11, b, f1)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done.index((n + 2 * b) % DONES), count=1)
            if b == 1:
                mbarrier.arrive(done.index((n + 1) % DONES), count=1)
        same = _again(tile)
        p0, p1, inside = _scales(same, ends, across, heights, scales0, scales1, 0, 2, 0, BN, 8)
        gl.store(p0, e00.to(gl.uint16), mask=inside)
        gl.store(p1, e10.to(gl.uint16), mask=inside)
        p0, p1, inside = _scales(same, ends, across, heights, scales0, scales1, 1, 2, 0, BN, 8)
        gl.store(p0, e01.to(gl.uint16), mask=inside)
        gl.store(p1, e11.to(gl.uint16), mask=inside)
        it += CODE_PARTS
        n += CODE_PARTS


@gluon.jit
def _pair_math(
    P, Q, full, empty, done, ends, across, salts, heights, scales0, scales1, M,
    scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    scalars, seed = load_scalars(scalars_ptr, seed_ptr, SCALARS)
    kept = constants(seed)
    it = 0
    n = 0
    for tile in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        # The exponents of a thread's four rows are one number.
        e0 = gl.zeros((32,), gl.int32, gl.SliceLayout(1, unit_layout(4)))
        e1 = e0
        for q in gl.static_range(4):
            p0, p1, inside = _scales(
                tile, ends, across, heights, scales0, scales1, q % 2, 2, q // 2 * HALF, PAIR_BN, 4
            )
            e0 = e0 | gl.load(p0, mask=inside, other=0).to(gl.int32) << 8 * q
            e1 = e1 | gl.load(p1, mask=inside, other=0).to(gl.int32) << 8 * q
        acc, it = multiply(it, M, P, Q, full, empty)
        # From the tile's number again: addresses are not kept while it is multiplied.
        same = _again(tile)
        first, tk, salt = place(same, ends, across, salts)
        pitch = tk * PAIR_BK
        base = (same - first) // tk * PAIR_BN * pitch + (same - first) % tk * PAIR_BK + salt
        rows = row_halves(acc)
        for half in gl.static_range(2):
            left, right = pieces(P, Q, wait_full(it, full))
            m, v = pieces(P, Q, wait_full(it + 1, full))
            g = units(rows[half])
            for unit in gl.static_range(2):
                f0, f1 = update_unit(
                    g[unit], m, v, left, right, unit,
                    (_byte(e0, 2 * half + unit), _byte(e1, 2 * half + unit)),
                    0, base + half * HALF * pitch, pitch, seed, kept, scalars,
                    RULE, STOCHASTIC,
                )  # fmt: skip
                e0 = _with_byte(e0, 2 * half + unit, f0)
                e1 = _with_byte(e1, 2 * half + unit, f1)
                if unit == 0:
                    # Else the compiler mixes both units, for which the registers do not suffice.
                    thread_barrier()
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done.index(n % DONES), count=1)
            it += CODE_PART
            n += 1
        same = _again(tile)
        for q in gl.static_range(4):
            p0, p1, inside = _scales(
                same, ends, across, heights, scales0, scales1, q % 2, 2, q // 2 * HALF, PAIR_BN, 4
            )
            gl.store(p0, _byte(e0, q).to(gl.uint8), mask=inside)
            gl.store(p1, _byte(e1, q).to(gl.uint8), mask=inside)


@gluon.jit
def _geometry(tile, ends, across, salts, heights, scales0, scales1):
    """Of a tile: its row and column of tiles. Of its matrix: where it ends, tiles across, height,
    salt, exponents. And how far the program's next tile lies below and to the right."""
    first, tk, height, p0, p1 = _of_tile(tile, ends, across, heights, scales0, scales1)
    _, _, salt = place(tile, ends, across, salts)
    end = ends[GROUPS - 1]
    for j in gl.static_range(1, GROUPS):
        end = gl.where(tile < ends[GROUPS - 1 - j], ends[GROUPS - 1 - j], end)
    row = (tile - first) // tk
    down = gl.num_programs(0) // tk
    right = gl.num_programs(0) - down * tk
    # A tile beyond the last has no rows.
    height = gl.where(tile < end, height, 0)
    return row, tile - first - row * tk, end, tk, height, salt, p0, p1, down, right


@gluon.jit
def _load_exponents(p0, p1, row, column, tk, height):
    """Of both states, in the 64 rows of a half that begins at ``row``."""
    at = unit_rows(8, 0, 1) + row
    offset = at * tk + column
    e0 = gl.load(p0 + offset, mask=at < height, other=0)
    return e0, gl.load(p1 + offset, mask=at < height, other=0)


@gluon.jit
def _apart_update(
    S, full, G, given, taken, done, ends, across, salts, heights, scales0, scales1,
    scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    scalars, seed = load_scalars(scalars_ptr, seed_ptr, SCALARS)
    kept = constants(seed)
    start = gl.program_id(0)
    row, column, end, tk, height, salt, p0, p1, down, right = _geometry(
        start, ends, across, salts, heights, scales0, scales1
    )
    a0, a1 = _load_exponents(p0, p1, row * PAIR_BN, column, tk, height)
    b0, b1 = _load_exponents(p0, p1, row * PAIR_BN + HALF, column, tk, height)
    it = 0
    for tile in range(start, ends[GROUPS - 1], gl.num_programs(0)):
        # Of both halves, a byte each. Used here, because who waits for one load waits for all, also
        # for those below.
        old0 = _again(a0.to(gl.int32) | b0.to(gl.int32) << 8)
        old1 = _again(a1.to(gl.int32) | b1.to(gl.int32) << 8)
        # Where the next tile lies: eight warps would wait for a division, which is rarely needed.
        wrap = column + right >= tk
        row2 = row + down + gl.where(wrap, 1, 0)
        column2 = column + right - gl.where(wrap, tk, 0)
        end2, tk2, height2, salt2, q0, q1, down2, right2 = (
            end, tk, height, salt, p0, p1, down, right,
        )  # fmt: skip
        if tile + gl.num_programs(0) >= end:
            row2, column2, end2, tk2, height2, salt2, q0, q1, down2, right2 = _geometry(
                tile + gl.num_programs(0), ends, across, salts, heights, scales0, scales1
            )
        # Its exponents come while this one is updated. No other tile has them.
        c0, c1 = _load_exponents(q0, q1, row2 * PAIR_BN, column2, tk2, height2)
        d0, d1 = _load_exponents(q0, q1, row2 * PAIR_BN + HALF, column2, tk2, height2)
        pitch = tk * PAIR_BK
        for half in range(2):
            at = row * PAIR_BN + half * HALF
            g = take_gradient(it, G, given, taken)
            i = wait_full(it, full) * CODE_PIECES
            e0, e1 = update_unit(
                g, S.index(i + 2), S.index(i + 3), S.index(i), S.index(i + 1), 0,
                ((old0 >> 8 * half) & 0xFF, (old1 >> 8 * half) & 0xFF), 0,
                at * pitch + column * PAIR_BK + salt, pitch, seed, kept, scalars, RULE, STOCHASTIC,
            )  # fmt: skip
            finish(it, done)
            rows = unit_rows(8, 0, 1) + at
            offset = rows * tk + column
            gl.store(p0 + offset, e0.to(gl.uint8), mask=rows < height)
            gl.store(p1 + offset, e1.to(gl.uint8), mask=rows < height)
            it += 1
        a0, a1, b0, b1 = c0, c1, d0, d1
        row, column, end, tk, height = row2, column2, end2, tk2, height2
        salt, p0, p1, down, right = salt2, q0, q1, down2, right2


_INTEGERS = [f"{name}{j}" for name in "ekah" for j in range(GROUPS.value)]
_INTEGERS += ["M", "behind", "delay"]
_POINTERS = [f"{name}{j}" for name in ("sm", "sv") for j in range(GROUPS.value)]


@gluon.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS)
def _wgrad_update_hopper_int8_kernel(
    dy0, dy1, dy2, dy3,
    x0, x1, x2, x3,
    w0, w1, w2, w3,
    m0, m1, m2, m3,
    v0, v1, v2, v3,
    e0, e1, e2, e3,  # tiles of all matrices up to and with this one
    k0, k1, k2, k3,  # tiles across a row of the matrix
    a0, a1, a2, a3,  # salts, multiples of 256
    h0, h1, h2, h3,  # rows of the matrix
    sm0, sm1, sm2, sm3,  # exponents of both states; two a number if LAYOUT is wide
    sv0, sv1, sv2, sv3,
    M, behind, delay, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    begin(behind)
    dy = (dy0, dy1, dy2, dy3)
    x = (x0, x1, x2, x3)
    w = (w0, w1, w2, w3)
    m = (m0, m1, m2, m3)
    v = (v0, v1, v2, v3)
    ends = (e0, e1, e2, e3)
    across = (k0, k1, k2, k3)
    salts = (a0, a1, a2, a3)
    heights = (h0, h1, h2, h3)
    scales0 = (sm0, sm1, sm2, sm3)
    scales1 = (sv0, sv1, sv2, sv3)
    smem: gl.constexpr = w0.layout
    if LAYOUT == "apart":
        P, Q, full, empty, done = allocate(PAIR_BM, PAIR_BN, PAIR_BK, APART_SLOTS, dy0, x0)
        S, loaded, stored, G, given, taken = allocate_states()
        gl.warp_specialize(
            [
                (_apart_update, (
                    S, loaded, G, given, taken, done, ends, across, salts, heights,
                    scales0, scales1, scalars_ptr, seed_ptr, SCALARS, RULE, STOCHASTIC,
                )),
                (multiplier, (ends, M, P, Q, full, empty, G, given, taken)),
                (operand_loader, (dy, x, ends, across, M, P, Q, full, empty)),
                (state_loader, (w, m, v, ends, across, S, loaded, stored)),
                (apart_storer, (w, m, v, ends, across, S, stored, done)),
            ],
            WORKER_WARPS,
            WORKER_REGISTERS,
        )  # fmt: skip
    elif LAYOUT == "pair":
        P, Q, full, empty, done = allocate(PAIR_BM, PAIR_BN, PAIR_BK, PAIR_SLOTS, dy0, x0)
        gl.warp_specialize(
            [
                (_pair_math, (
                    P, Q, full, empty, done, ends, across, salts, heights, scales0, scales1, M,
                    scalars_ptr, seed_ptr, SCALARS, RULE, STOCHASTIC,
                )),
                (pair_loader, (
                    dy, x, w, m, v, ends, across, M, delay, P, Q, full, empty, True,
                )),
                (pair_storer, (w, m, v, ends, across, M, P, Q, done, empty, True)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    else:
        P, Q, full, empty, done = allocate(BM, BN, BK, SLOTS, dy0, x0)
        gl.warp_specialize(
            [
                (_math, (
                    P, Q, full, empty, done, ends, across, salts, heights, scales0, scales1, M,
                    scalars_ptr, seed_ptr, SCALARS, RULE, STOCHASTIC, smem,
                )),
                (loader, (dy, x, w, m, v, ends, across, M, P, Q, full, empty, True)),
                (storer, (w, m, v, ends, across, M, P, Q, done, empty, True)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    if behind != 0:
        wait_for_launches_in_front()

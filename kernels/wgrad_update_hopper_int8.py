"""The fused update for Hopper with 8-bit states: kernels/wgrad_update_hopper.py launches it.

States are codes [N, K], int8 or uint8, with exponents [N, K / 128], uint8 (kernels/block_code.py).
Both are updated as by kernels/apply_rule.py, with the same random bits.

A row of a tile lies in four lanes of a warp, so the largest value of a block of 128 columns, which
its exponent depends on, is a reduction within a thread and over four lanes. A block's new states
stay in registers until it is known; therefore a block is updated in two units of 64 rows, the even
and the odd eights of its rows, 32 elements a thread. Two neighbouring columns are one number from
the slot to the slot, because that is what a thread owns next to each other. The exponents, two
bytes a row of a tile and state, are read before the tile is multiplied.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from forge.kernels import block_code
from forge.kernels import block_code_ptx as ptx
from forge.kernels.hopper_ring import (
    BK,
    BN,
    CODE_PARTS,
    GROUPS,
    SLOTS,
    allocate,
    begin,
    chunk_views,
    gluon_function,
    halves,
    loader,
    multiply,
    place,
    storer,
    thread_barrier,
    view,
    wait_for_launches_in_front,
)

_exponent = gluon_function(block_code.block_exponent)
_inverse_scale = gluon_function(block_code.inverse_scale)

# Inline PTX.
_DECODE_SIGNED = gl.constexpr(ptx.DECODE_SIGNED)
_DECODE_UNSIGNED = gl.constexpr(ptx.DECODE_UNSIGNED)
_DECODE_CONSTRAINTS = gl.constexpr(ptx.DECODE_CONSTRAINTS)
_WIDEN = gl.constexpr(ptx.WIDEN)
_HASH = gl.constexpr(ptx.HASH)
_ROUND_STOCHASTIC = gl.constexpr(ptx.ROUND_STOCHASTIC)
_ROUND_NEAREST = gl.constexpr(ptx.ROUND_NEAREST)
_ENCODE_STOCHASTIC = gl.constexpr(ptx.ENCODE_STOCHASTIC)
_ENCODE_NEAREST = gl.constexpr(ptx.ENCODE_NEAREST)
_ENCODE_CONSTRAINTS = gl.constexpr(ptx.ENCODE_CONSTRAINTS)

# What is compared may be NaN, which is then the largest.
_ALL = gl.constexpr(tl.PropagateNan.ALL)


@gluon.constexpr_function
def _unit_layout(columns, first):
    """Of [64, columns] in the math warps: eight rows a warp, a row in four lanes.

    ``first``: the columns of two neighbouring lanes are so far apart, and what is less in a lane.
    """
    inside = [[0, 1]] if first == 2 else []
    beyond = [[0, c] for c in (4 * first, 8 * first, 16 * first, 32 * first) if c < columns]
    return gl.DistributedLinearLayout(
        reg_bases=inside + beyond,
        lane_bases=[[0, first], [0, 2 * first], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.constexpr_function
def _slot_layout(states, columns):
    """As ``_unit_layout(columns, 1)``, of [states, warps, one unit of two, rows, columns]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0, 0, 0, 0]] * (states == 2)
        + [[0, 0, 0, 0, c] for c in (4, 8, 16, 32) if c < columns],
        lane_bases=[[0, 0, 0, 0, c] for c in (1, 2)] + [[0, 0, 0, r, 0] for r in (1, 2, 4)],
        warp_bases=[[0, w, 0, 0, 0] for w in (1, 2, 4)],
        block_bases=[],
        shape=[states, 8, 1, 8, columns],
    )


# A unit, 64 rows and 128 columns, as the accumulators lie; the same with two columns a number.
_UNIT = gl.constexpr(_unit_layout(128, 2))
_PAIRS = gl.constexpr(_unit_layout(64, 1))
# In a slot, with two columns a number: 128 codes of both states, or 64 of w.
_CODES = gl.constexpr(_slot_layout(2, 64))
_WEIGHTS = gl.constexpr(_slot_layout(1, 32))
_SMEM_CODES = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
)
_SMEM_WEIGHTS = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=5)
)


@gluon.jit
def _as(x, layout: gl.constexpr):
    """``x`` in a layout that places every element where it is."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _units(x):
    """[128, 128] in two [64, 128]: of 16 rows of a warp the first eight, and the others."""
    a, b = x.reshape([8, 2, 8, 128]).permute((0, 2, 3, 1)).split()
    return _as(a.reshape([64, 128]), _UNIT), _as(b.reshape([64, 128]), _UNIT)


@gluon.jit
def _pairs(x):
    """Even and odd columns of a unit."""
    even, odd = x.reshape([64, 64, 2]).split()
    return _as(even, _PAIRS), _as(odd, _PAIRS)


@gluon.jit
def _interleave(even, odd):
    return _as(gl.join(even, odd).reshape([64, 128]), _UNIT)


@gluon.jit
def _decode(codes, exponent, SIGNED: gl.constexpr):
    """A unit, fp32, of its codes, two a number [64, 64], and exponents [64]."""
    scale = (_as(exponent, gl.SliceLayout(1, _PAIRS)) << 23).to(gl.float32, bitcast=True)
    if SIGNED:
        offset = scale * -(2.0**-15)
    else:
        offset = scale * -(2.0**-31)
    even, odd = gl.inline_asm_elementwise(
        _DECODE_SIGNED if SIGNED else _DECODE_UNSIGNED,
        _DECODE_CONSTRAINTS,
        [codes, scale[:, None], offset[:, None]],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return _interleave(even, odd)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def _exponents(x, margin: gl.constexpr):
    """The exponent of each row of a state's unit, int32 [64]."""
    largest = gl.reduce(gl.abs(x), 1, _larger)
    return _exponent(largest.to(gl.int32, bitcast=True), margin)


@gluon.jit
def _round(w, random, STOCHASTIC: gl.constexpr):
    """A unit of w in bf16, two a number [64, 64]."""
    even, odd = _pairs(w.to(gl.int32, bitcast=True))
    return gl.inline_asm_elementwise(
        _ROUND_STOCHASTIC if STOCHASTIC else _ROUND_NEAREST,
        "=r,r,r,r",
        [even, odd, random],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _encode(m, v, e0, e1, random, STOCHASTIC: gl.constexpr):
    """Codes of both states, two a number [64, 64], with exponents ``e0`` and ``e1`` [64]."""
    inverse0 = _as(_inverse_scale(e0), gl.SliceLayout(1, _PAIRS))
    inverse1 = _as(_inverse_scale(e1), gl.SliceLayout(1, _PAIRS))
    m0, m1 = _pairs(m.to(gl.int32, bitcast=True))
    v0, v1 = _pairs(v.to(gl.int32, bitcast=True))
    a, b = gl.inline_asm_elementwise(
        _ENCODE_STOCHASTIC if STOCHASTIC else _ENCODE_NEAREST,
        _ENCODE_CONSTRAINTS,
        [m0, m1, v0, v1, inverse0[:, None], inverse1[:, None], random],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return a, b


@gluon.jit
def _codes(Q, unit: gl.constexpr):
    return view(Q, gl.uint16, [2, 8, 2, 8, 64], _SMEM_CODES).slice(unit, 1, 2)


@gluon.jit
def _weights(memory, unit: gl.constexpr):
    return view(memory, gl.int32, [1, 8, 2, 8, 32], _SMEM_WEIGHTS).slice(unit, 1, 2)


@gluon.jit
def _load_unit(Q, left, right, unit: gl.constexpr):
    """Codes of both states, and w, of a unit: two a number, [64, 64] int32 each."""
    both = _codes(Q, unit).load(_CODES).to(gl.int32)
    m, v = both.reshape([2, 64, 64]).permute((1, 2, 0)).split()
    a = _weights(left, unit).load(_WEIGHTS).reshape([64, 32])
    b = _weights(right, unit).load(_WEIGHTS).reshape([64, 32])
    w = gl.join(a, b).permute((0, 2, 1)).reshape([64, 64])
    return _as(m, _PAIRS), _as(v, _PAIRS), _as(w, _PAIRS)


@gluon.jit
def _store_unit(Q, left, right, unit: gl.constexpr, m, v, w):
    both = gl.join(m.to(gl.uint16), v.to(gl.uint16)).permute((2, 0, 1))
    _codes(Q, unit).store(_as(both.reshape([2, 8, 1, 8, 64]), _CODES))
    a, b = halves(w)
    _weights(left, unit).store(_as(a.reshape([1, 8, 1, 8, 32]), _WEIGHTS))
    _weights(right, unit).store(_as(b.reshape([1, 8, 1, 8, 32]), _WEIGHTS))


@gluon.jit
def _update_unit(
    g, Q, left, right, unit: gl.constexpr, exponents, numbers, scalars,
    RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    """Update a unit in its slots; the new exponents."""
    m, v, w = _load_unit(Q, left, right, unit)
    states = (_decode(m, exponents[0], True), _decode(v, exponents[1], False))
    even, odd = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,r", [w], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    w, states = RULE(_interleave(even, odd), g, states, scalars)
    random = numbers
    if STOCHASTIC:
        random = gl.inline_asm_elementwise(
            _HASH, "=r,r", [numbers], dtype=gl.uint32, is_pure=True, pack=1
        )
    w = _round(w, random, STOCHASTIC)
    e0 = _exponents(states[0], 0x1000FF)
    e1 = _exponents(states[1], 0x0FFFFF)
    m, v = _encode(states[0], states[1], e0, e1, random, STOCHASTIC)
    _store_unit(Q, left, right, unit, m, v, w)
    return e0, e1


@gluon.jit
def _rows(unit: gl.constexpr, layout: gl.constexpr):
    """The rows of a unit in their tile."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    return i // 8 * 16 + i % 8 + 8 * unit


@gluon.jit
def _numbers(b: gl.constexpr, unit: gl.constexpr, base, pitch, seed):
    """Seeded numbers of a unit's even elements [64, 64]."""
    # base is a multiple of 256 and the column is below it: xor is the sum. In this order a thread
    # needs one register a row and an immediate operand a column.
    rows = (_rows(unit, _PAIRS) * pitch + base).to(gl.uint32) ^ seed
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, _PAIRS)).to(gl.uint32) * 2
    return (rows[:, None] ^ (columns & 7)[None, :]) ^ ((columns & 0x78) + b * 128)[None, :]


@gluon.jit
def _scales(unit: gl.constexpr, row, column, tk, height):
    """Where the exponents of a unit's rows lie, a number for the two blocks; which rows exist."""
    rows = _rows(unit, _UNIT) + row
    return rows * tk + column, rows < height


@gluon.jit
def _of_block(both, b: gl.constexpr):
    return (both.to(gl.int32) >> 8 * b) & 0xFF


@gluon.jit
def _with_block(both, b: gl.constexpr, exponent):
    other = both.to(gl.int32) & (0xFF00 >> 8 * b)
    return (other | exponent << 8 * b).to(gl.uint16)


@gluon.jit
def _of_tile(tile, ends, across, salts, heights, scales0, scales1):
    """Its first row, its column in tiles; of its matrix: tiles across, height, exponents."""
    first, tk, _ = place(tile, ends, across, salts)
    height = heights[0]
    p0 = scales0[0]
    p1 = scales1[0]
    for j in gl.static_range(1, GROUPS):
        beyond = tile >= ends[j - 1]
        height = gl.where(beyond, heights[j], height)
        p0 = gl.where(beyond, scales0[j], p0)
        p1 = gl.where(beyond, scales1[j], p1)
    return (tile - first) // tk * BN, (tile - first) % tk, tk, height, p0, p1


@gluon.jit
def _again(x):
    """``x``, of which the compiler does not know that it is."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _math(
    P, Q, full, empty, done, ends, across, salts, heights, scales0, scales1, M,
    scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr, smem: gl.constexpr,
):  # fmt: skip
    scalars = ()
    for j in gl.static_range(SCALARS):
        scalars = scalars + (gl.load(scalars_ptr + j),)
    seed = gl.load(seed_ptr).to(gl.uint32)
    it = 0
    n = 0
    for tile in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        row, column, tk, height, p0, p1 = _of_tile(
            tile, ends, across, salts, heights, scales0, scales1
        )
        # The exponents of both blocks are one number. They are here when they are needed.
        at0, inside0 = _scales(0, row, column, tk, height)
        at1, inside1 = _scales(1, row, column, tk, height)
        e00 = gl.load(p0 + at0, mask=inside0, other=0)
        e10 = gl.load(p1 + at0, mask=inside0, other=0)
        e01 = gl.load(p0 + at1, mask=inside1, other=0)
        e11 = gl.load(p1 + at1, mask=inside1, other=0)
        acc, it = multiply(it, M, P, Q, full, empty)
        _, tk, salt = place(_again(tile), ends, across, salts)
        pitch = tk * BK
        base = row * pitch + column * BK + salt
        blocks = halves(acc)
        middle = (it + 1) % SLOTS
        w1, w2, _ = chunk_views(P.index(middle), Q.index(middle), smem)
        for b in gl.static_range(2):
            i = (it + 2 * b) % SLOTS
            w0, _, _ = chunk_views(P.index(i), Q.index(i), smem)
            left, right = (w0, w1) if b == 0 else (w2, w0)
            mbarrier.wait(full.index(i), ((it + 2 * b) // SLOTS) & 1)
            if b == 0:
                mbarrier.wait(full.index(middle), ((it + 1) // SLOTS) & 1)
            g0, g1 = _units(blocks[b])
            f0, f1 = _update_unit(
                g0, Q.index(i), left, right, 0, (_of_block(e00, b), _of_block(e10, b)),
                _numbers(b, 0, base, pitch, seed), scalars, RULE, STOCHASTIC,
            )  # fmt: skip
            e00 = _with_block(e00, b, f0)
            e10 = _with_block(e10, b, f1)
            # Else the compiler mixes both units, for which the registers do not suffice.
            thread_barrier()
            f0, f1 = _update_unit(
                g1, Q.index(i), left, right, 1, (_of_block(e01, b), _of_block(e11, b)),
                _numbers(b, 1, base, pitch, seed), scalars, RULE, STOCHASTIC,
            )  # fmt: skip
            e01 = _with_block(e01, b, f0)
            e11 = _with_block(e11, b, f1)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done.index((n + 2 * b) % SLOTS), count=1)
            if b == 1:
                mbarrier.arrive(done.index((n + 1) % SLOTS), count=1)
        # From the tile's number again: eight addresses are not kept while it is multiplied.
        row, column, tk, height, p0, p1 = _of_tile(
            _again(tile), ends, across, salts, heights, scales0, scales1
        )
        at0, inside0 = _scales(0, row, column, tk, height)
        at1, inside1 = _scales(1, row, column, tk, height)
        gl.store(p0 + at0, e00, mask=inside0)
        gl.store(p1 + at0, e10, mask=inside0)
        gl.store(p0 + at1, e01, mask=inside1)
        gl.store(p1 + at1, e11, mask=inside1)
        it += CODE_PARTS
        n += CODE_PARTS


_INTEGERS = [f"{name}{j}" for name in "ekah" for j in range(GROUPS.value)] + ["M", "behind"]
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
    sm0, sm1, sm2, sm3,  # exponents of both states, two bytes a number
    sv0, sv1, sv2, sv3,
    M, behind, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
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
    P, Q, full, empty, done = allocate(dy0, x0)
    smem: gl.constexpr = w0.layout
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

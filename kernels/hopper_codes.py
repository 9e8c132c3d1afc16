"""A unit of a tile with 8-bit states, updated in shared memory: for wgrad_update_hopper_int8.py.

A row of a tile lies in four lanes of a warp, so the largest value of a block of 128 columns, which
its exponent depends on, is a reduction within a thread and over four lanes. A block's new states
stay in registers until it is known; therefore rows are updated in units of eight rows of each warp
and 128 columns, 32 elements a thread: of 16 rows, as accumulators lie, the first or the last
eight. Two neighbouring columns are one number from the slot to the slot, because that is what a
thread owns next to each other.

W is the number of warps, four or eight; a unit has 8 W rows. Memory holds two units, or one.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forge.kernels import block_code
from forge.kernels import block_code_ptx as ptx
from forge.kernels.hopper_ring import gluon_function, halves, view

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
def rows_layout(warps, columns, first):
    """Of [8 W, columns]: eight rows a warp, a row in four lanes.

    ``first``: the columns of two neighbouring lanes are so far apart, and what is less in a lane.
    """
    inside = [[0, 1]] if first == 2 else []
    beyond = [[0, c] for c in (4 * first, 8 * first, 16 * first, 32 * first) if c < columns]
    return gl.DistributedLinearLayout(
        reg_bases=inside + beyond,
        lane_bases=[[0, first], [0, 2 * first], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8 * w, 0] for w in (1, 2, 4) if w < warps],
        block_bases=[],
        shape=[8 * warps, columns],
    )


@gluon.constexpr_function
def unit_layout(warps):
    """A unit as the accumulators lie."""
    return rows_layout(warps, 128, 2)


@gluon.constexpr_function
def _pairs_layout(warps):
    """The same with two columns a number."""
    return rows_layout(warps, 64, 1)


@gluon.constexpr_function
def _slot_layout(warps, columns):
    """As ``rows_layout(warps, columns, 1)``, of [warps, one of the units, rows, columns]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, c] for c in (4, 8, 16, 32) if c < columns],
        lane_bases=[[0, 0, 0, c] for c in (1, 2)] + [[0, 0, r, 0] for r in (1, 2, 4)],
        warp_bases=[[w, 0, 0, 0] for w in (1, 2, 4) if w < warps],
        block_bases=[],
        shape=[warps, 1, 8, columns],
    )


_SMEM_CODES = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
)
_SMEM_WEIGHTS = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
)


@gluon.jit
def _as(x, layout: gl.constexpr):
    """``x`` in a layout that places every element where it is."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def units(x):
    """[16 W, 128] in two [8 W, 128]: of 16 rows of a warp the first eight, and the others."""
    W: gl.constexpr = x.shape[0] // 16
    a, b = x.reshape([W, 2, 8, 128]).permute((0, 2, 3, 1)).split()
    layout: gl.constexpr = unit_layout(W)
    return _as(a.reshape([8 * W, 128]), layout), _as(b.reshape([8 * W, 128]), layout)


@gluon.jit
def _pairs(x):
    """Even and odd columns of a unit."""
    layout: gl.constexpr = _pairs_layout(x.shape[0] // 8)
    even, odd = x.reshape([x.shape[0], 64, 2]).split()
    return _as(even, layout), _as(odd, layout)


@gluon.jit
def _interleave(even, odd):
    layout: gl.constexpr = unit_layout(even.shape[0] // 8)
    return _as(gl.join(even, odd).reshape([even.shape[0], 128]), layout)


@gluon.jit
def _each_pair(rows):
    """A number for each row, next to pairs of columns: [8 W, 1]."""
    layout: gl.constexpr = gl.SliceLayout(1, _pairs_layout(rows.shape[0] // 8))
    return _as(rows, layout)[:, None]


@gluon.jit
def _decode(codes, exponent, shift, SIGNED: gl.constexpr):
    """A unit, fp32, of its codes, two a number [8 W, 64], and exponents [8 W]."""
    scale = (_each_pair(exponent) << 23).to(gl.float32, bitcast=True)
    if SIGNED:
        offset = scale * -(2.0**-15)
    else:
        offset = scale * -(2.0**-31)
    even, odd = gl.inline_asm_elementwise(
        _DECODE_SIGNED if SIGNED else _DECODE_UNSIGNED,
        _DECODE_CONSTRAINTS,
        [codes, scale, offset, shift],
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
    """The exponent of each row of a state's unit, int32 [8 W]."""
    largest = gl.reduce(gl.abs(x), 1, _larger)
    return _exponent(largest.to(gl.int32, bitcast=True), margin)


@gluon.jit
def _round(w, random, STOCHASTIC: gl.constexpr):
    """A unit of w in bf16, two a number [8 W, 64]."""
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
def _encode(m, v, e0, e1, random, half, STOCHASTIC: gl.constexpr):
    """Codes of both states, two a number [8 W, 64], with exponents ``e0`` and ``e1`` [8 W]."""
    inverse0 = _each_pair(_inverse_scale(e0))
    inverse1 = _each_pair(_inverse_scale(e1))
    m0, m1 = _pairs(m.to(gl.int32, bitcast=True))
    v0, v1 = _pairs(v.to(gl.int32, bitcast=True))
    a, b = gl.inline_asm_elementwise(
        _ENCODE_STOCHASTIC if STOCHASTIC else _ENCODE_NEAREST,
        _ENCODE_CONSTRAINTS,
        [m0, m1, v0, v1, inverse0, inverse1, random, half],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return a, b


@gluon.jit
def _zero(x):
    """Zero, of which the compiler does not know that it is."""
    # x^2 + x is even.
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; mad.lo.u32 t, $1, $1, $1; and.b32 $0, t, 1;}",
        "=r,r",
        [x],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def constants(seed):
    """0x80 and 2^20 in registers that the compiler keeps.

    With the first each `prmt` would take an instruction more, to fetch one of its two constants. A
    product with the second would be a shift, on the integer unit, which has more to do than the
    one that multiplies.
    """
    return _zero(seed) + 0x80, _zero(seed + 1) + 0x100000


@gluon.jit
def _codes(memory, W: gl.constexpr, unit: gl.constexpr):
    count: gl.constexpr = memory.shape[0] // (8 * W)
    return view(memory, gl.uint16, [W, count, 8, 64], _SMEM_CODES).slice(unit, 1, 1)


@gluon.jit
def _weights(memory, W: gl.constexpr, unit: gl.constexpr):
    count: gl.constexpr = memory.shape[0] // (8 * W)
    return view(memory, gl.int32, [W, count, 8, 32], _SMEM_WEIGHTS).slice(unit, 1, 1)


@gluon.jit
def _load_codes(memory, W: gl.constexpr, unit: gl.constexpr):
    codes = _codes(memory, W, unit).load(_slot_layout(W, 64)).to(gl.int32)
    return _as(codes.reshape([8 * W, 64]), _pairs_layout(W))


@gluon.jit
def _load_weights(left, right, W: gl.constexpr, unit: gl.constexpr):
    a = _weights(left, W, unit).load(_slot_layout(W, 32)).reshape([8 * W, 32])
    b = _weights(right, W, unit).load(_slot_layout(W, 32)).reshape([8 * W, 32])
    return _as(gl.join(a, b).permute((0, 2, 1)).reshape([8 * W, 64]), _pairs_layout(W))


@gluon.jit
def _store(memory, x, layout: gl.constexpr):
    memory.store(_as(x.reshape(memory.shape), layout))


@gluon.jit
def _rows(unit: gl.constexpr, count: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """The rows of a unit among the rows of all ``count`` units."""
    i = gl.arange(0, 8 * W, layout=gl.SliceLayout(1, layout))
    return i // 8 * (8 * count) + i % 8 + 8 * unit


@gluon.jit
def _numbers(
    W: gl.constexpr, unit: gl.constexpr, count: gl.constexpr, column: gl.constexpr, base, pitch,
    seed,
):  # fmt: skip
    """Seeded numbers of the even elements [8 W, 64] of a unit that begins at ``column``."""
    # base is a multiple of the tile's columns and the column is below it: xor is the sum. In this
    # order a thread needs one register a row and an immediate operand a column.
    layout: gl.constexpr = _pairs_layout(W)
    rows = (_rows(unit, count, W, layout) * pitch + base).to(gl.uint32) ^ seed
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout)).to(gl.uint32) * 2
    return (rows[:, None] ^ (columns & 7)[None, :]) ^ ((columns & 0x78) + column)[None, :]


@gluon.jit
def unit_rows(W: gl.constexpr, unit: gl.constexpr, count: gl.constexpr):
    """Rows of a unit, as exponents of them lie, int32 [8 W]."""
    return _rows(unit, count, W, unit_layout(W))


@gluon.jit
def update_unit(
    g, m, v, left, right, unit: gl.constexpr, exponents, column: gl.constexpr, base, pitch, seed,
    kept, scalars,
    RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    """Update a unit in its slots; the new exponents, int32 [8 W] each.

    Args:
        g: gradient [8 W, 128], fp32.
        m, v: memory of both states' codes [8 W, or 16 W, 128].
        left, right: memory of w, bf16 [8 W, or 16 W, 64] each.
        exponents: of both states, int32 [8 W].
        column: of the tile, where the unit begins.
        base, pitch: salted number of the element where the memory begins; numbers from row to row.
        kept: ``constants()``.
    """
    W: gl.constexpr = g.shape[0] // 8
    states = (
        _decode(_load_codes(m, W, unit), exponents[0], kept[1], True),
        _decode(_load_codes(v, W, unit), exponents[1], kept[1], False),
    )
    even, odd = gl.inline_asm_elementwise(
        _WIDEN,
        "=r,=r,r",
        [_load_weights(left, right, W, unit)],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    w, states = RULE(_interleave(even, odd), g, states, scalars)
    e0 = _exponents(states[0], 0x1000FF)
    e1 = _exponents(states[1], 0x0FFFFF)
    # Zero, but the compiler cannot know that: else it draws all random bits beforehand and spills.
    after = _as(_zero(e0), gl.SliceLayout(1, _pairs_layout(W)))
    numbers = _numbers(W, unit, m.shape[0] // (8 * W), column, base, pitch, seed ^ after)
    random = numbers
    if STOCHASTIC:
        random = gl.inline_asm_elementwise(
            _HASH, "=r,r", [numbers], dtype=gl.uint32, is_pure=True, pack=1
        )
    a, b = halves(_round(w, random, STOCHASTIC))
    _store(_weights(left, W, unit), a, _slot_layout(W, 32))
    _store(_weights(right, W, unit), b, _slot_layout(W, 32))
    a, b = _encode(states[0], states[1], e0, e1, random, kept[0], STOCHASTIC)
    _store(_codes(m, W, unit), a.to(gl.uint16), _slot_layout(W, 64))
    _store(_codes(v, W, unit), b.to(gl.uint16), _slot_layout(W, 64))
    return e0, e1

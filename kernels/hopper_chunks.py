"""A chunk of a tile with bf16 states, updated in shared memory: for wgrad_update_hopper.py.

A chunk has 64 columns, and 16 rows a warp, as accumulators lie, or eight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forge.kernels.hopper_codes import rows_layout
from forge.kernels.hopper_ring import CHUNK, widen

# Two neighbours at a time: $0-2 the stored pairs of w and the states, $3-8 their fp32 values, $9-10
# the element numbers, seeded. As rounding.py: one hash for both, add its upper half, keep the upper
# half of the sum. A NaN of all ones would carry into the sign, so nothing is added to a pair whose
# w has one; a rule of two states makes w NaN whenever it makes a state NaN.
_ROUND = gl.constexpr("""{
.reg .f32 t, u;
.reg .b64 p;
.reg .b32 h, g, a, b;
mov.b32 t, $3; mov.b32 u, $4; set.num.u32.f32 g, t, u;
mul.wide.u32 p, $9, 0x9E3779B1; mov.b64 {a, b}, p; xor.b32 h, a, b;
mul.wide.u32 p, h, 0x85EBCA77; mov.b64 {a, b}, p; lop3.b32 h, a, b, g, 0x28; // (a ^ b) & g
mul.lo.u32 g, h, 0x9E3779B1;
shr.u32 a, h, 16; add.u32 a, a, $3; shr.u32 b, g, 16; add.u32 b, b, $4;
prmt.b32 $0, a, b, 0x7632;
shr.u32 a, h, 16; add.u32 a, a, $5; shr.u32 b, g, 16; add.u32 b, b, $6;
prmt.b32 $1, a, b, 0x7632;
shr.u32 a, h, 16; add.u32 a, a, $7; shr.u32 b, g, 16; add.u32 b, b, $8;
prmt.b32 $2, a, b, 0x7632;
}""")
_ROUND_CONSTRAINTS = gl.constexpr("=r,=r,=r,r,r,r,r,r,r,r,r")


@gluon.jit
def _stochastic_bf16(w, m, v, numbers):
    bits = (
        w.to(gl.int32, bitcast=True),
        m.to(gl.int32, bitcast=True),
        v.to(gl.int32, bitcast=True),
    )
    return gl.inline_asm_elementwise(
        _ROUND,
        _ROUND_CONSTRAINTS,
        [bits[0], bits[1], bits[2], numbers],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def _chunk_layout(rows, warps):
    """Of [rows, 64], which lie in so many warps."""
    if rows == 8 * warps:
        return rows_layout(warps, CHUNK.value, 2)
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[rows // 16, 1], instr_shape=[16, CHUNK.value, 16]
    )


@gluon.jit
def update_chunk(
    dw, wb, b0, b1, row: gl.constexpr, column: gl.constexpr, base, pitch, seed, scalars,
    RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    """Update w and both states in their slot, at ``row`` and ``column`` of the tile."""
    layout: gl.constexpr = _chunk_layout(wb.shape[0], gl.num_warps())
    dw = gl.convert_layout(dw, layout, assert_trivial=True)
    states = (widen(b0.load(layout)), widen(b1.load(layout)))
    w, states = RULE(widen(wb.load(layout)), dw, states, scalars)
    if STOCHASTIC:
        # base is a multiple of 128, or 256, and the column is below it: xor is the sum, and the
        # compiler cannot reassociate it into one address register for every element.
        rows = gl.arange(0, wb.shape[0], layout=gl.SliceLayout(1, layout)) + row
        columns = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout)) + column
        numbers = (rows * pitch + base).to(gl.uint32) ^ seed
        numbers = numbers[:, None] ^ columns.to(gl.uint32)[None, :]
        w, m, v = _stochastic_bf16(w, states[0], states[1], numbers)
        wb.store(w)
        b0.store(m)
        b1.store(v)
    else:
        wb.store(w.to(gl.bfloat16))
        b0.store(states[0].to(gl.bfloat16))
        b1.store(states[1].to(gl.bfloat16))

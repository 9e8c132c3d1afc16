"""Weight gradient and optimizer update in one kernel, for Hopper: everything overlaps.

    dW = dY^T X;  w, states = rule(w, dW, states, scalars)

The same as kernels/wgrad_update.py, with the same random bits. Shapes: dY [M, N], X [M, K]; w and
both states [N, K], contiguous; dY, X and w bf16, the states bf16 or 8-bit codes; K a multiple of
256, N of 8.

How the kernels are built is in kernels/hopper_ring.py, with two programs an SM in
kernels/hopper_pair.py. Here are the update of bf16 states, by chunks of 64 columns, and the
function that launches this kernel or, for 8-bit states, that of
kernels/wgrad_update_hopper_int8.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.hopper_pair import (
    HALF,
    PAIR_BK,
    PAIR_BLOCKS,
    PAIR_BM,
    PAIR_BN,
    PAIR_LAYOUTS,
    PAIR_REGISTERS,
    PAIR_SLOTS,
    PART,
    pair_loader,
    pair_storer,
    pieces,
)
from forge.kernels.hopper_ring import (
    BK,
    BLOCKS,
    BM,
    BN,
    CHUNK,
    DONES,
    GROUPS,
    LAYOUTS,
    PARTS,
    SLOTS,
    allocate,
    begin,
    chunk_views,
    gluon_function,
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
    widen,
)
from forge.kernels.runtime import Dual
from forge.kernels.target import Target
from forge.kernels.wgrad_update_hopper_int8 import _wgrad_update_hopper_int8_kernel

# wide: one program an SM, tiles of 128 x 256, eight warps that multiply a tile, then update it.
# pair: two programs an SM, tiles of 128 x 128, four such warps each. apart, of codes: one program,
# tiles of 128 x 128, warps that multiply and warps that update (kernels/hopper_apart.py).
Layout = Literal["wide", "pair", "apart"]
# The layout up to so many tokens, with bf16 states and with codes, by measurement: results/LOG.md.
CHOICE: dict[str, tuple[tuple[float, Layout], ...]] = {
    "bf16": ((1024, "pair"), (math.inf, "wide")),
    "int8": ((1024, "apart"), (2048, "pair"), (math.inf, "wide")),
}
# Programs an SM, warps of the first partition, and registers a thread at launch where the compiler
# would take more.
_PROGRAMS: dict[str, tuple[int, dict[str, int]]] = {
    "wide": (1, {"num_warps": 8}),
    "pair": (2, {"num_warps": 4, "maxnreg": PAIR_REGISTERS}),
    "apart": (1, {"num_warps": 8}),
}
# How much later the second programs of the SMs begin, ns a token: about half of a tile's time.
PAIR_DELAY = 8


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


@gluon.jit
def _update_chunk(
    dw, wb, b0, b1, row: gl.constexpr, column: gl.constexpr, base, pitch, seed, scalars,
    RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    """Update w and both states in their slot, at ``row`` and ``column`` of the tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[wb.shape[0] // 16, 1], instr_shape=[16, CHUNK, 16]
    )
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


@gluon.jit
def _math(
    P, Q, full, empty, done, ends, across, salts, M, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
    smem: gl.constexpr,
):  # fmt: skip
    scalars, seed = load_scalars(scalars_ptr, seed_ptr, SCALARS)
    it = 0
    n = 0
    for tile in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        acc, it = multiply(it, M, P, Q, full, empty)
        # Where this tile begins: matrix, row and column as one 32-bit index, salted.
        first, tk, salt = place(tile, ends, across, salts)
        pitch = tk * BK
        base = (tile - first) // tk * BN * pitch + (tile - first) % tk * BK + salt
        left, right = halves(acc)
        q0, q1 = halves(left)
        q2, q3 = halves(right)
        quarters = (q0, q1, q2, q3)
        for c in gl.static_range(PARTS):
            i = wait_full(it + c, full)
            wb, b0, b1 = chunk_views(P.index(i), Q.index(i), smem)
            _update_chunk(
                quarters[c], wb, b0, b1, 0, c * CHUNK, base, pitch, seed, scalars, RULE, STOCHASTIC
            )
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done.index((n + c) % DONES), count=1)
        it += PARTS
        n += PARTS


@gluon.jit
def _pair_math(
    P, Q, full, empty, done, ends, across, salts, M, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    scalars, seed = load_scalars(scalars_ptr, seed_ptr, SCALARS)
    it = 0
    n = 0
    for tile in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        acc, it = multiply(it, M, P, Q, full, empty)
        first, tk, salt = place(tile, ends, across, salts)
        pitch = tk * PAIR_BK
        base = (tile - first) // tk * PAIR_BN * pitch + (tile - first) % tk * PAIR_BK + salt
        upper, lower = row_halves(acc)
        for half in gl.static_range(2):
            chunks = halves(lower if half else upper)
            w = pieces(P, Q, wait_full(it, full))
            m = pieces(P, Q, wait_full(it + 1, full))
            v = pieces(P, Q, wait_full(it + 2, full))
            for c in gl.static_range(2):
                _update_chunk(
                    chunks[c], w[c], m[c], v[c], half * HALF, c * CHUNK, base, pitch, seed, scalars,
                    RULE, STOCHASTIC,
                )  # fmt: skip
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done.index(n % DONES), count=1)
            it += PART
            n += 1


_INTEGERS = [f"{name}{j}" for name in "eka" for j in range(GROUPS.value)]
_INTEGERS += ["M", "behind", "delay"]


@gluon.jit(do_not_specialize=_INTEGERS)
def _wgrad_update_hopper_kernel(
    dy0, dy1, dy2, dy3,
    x0, x1, x2, x3,
    w0, w1, w2, w3,
    m0, m1, m2, m3,
    v0, v1, v2, v3,
    e0, e1, e2, e3,  # tiles of all matrices up to and with this one
    k0, k1, k2, k3,  # tiles across a row of the matrix
    a0, a1, a2, a3,  # salts, multiples of 256
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
    smem: gl.constexpr = w0.layout
    if LAYOUT == "pair":
        P, Q, full, empty, done = allocate(PAIR_BM, PAIR_BN, PAIR_BK, PAIR_SLOTS, dy0, x0)
        gl.warp_specialize(
            [
                (_pair_math, (
                    P, Q, full, empty, done, ends, across, salts, M, scalars_ptr, seed_ptr,
                    SCALARS, RULE, STOCHASTIC,
                )),
                (pair_loader, (
                    dy, x, w, m, v, ends, across, M, delay, P, Q, full, empty, False,
                )),
                (pair_storer, (w, m, v, ends, across, M, P, Q, done, empty, False)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    else:
        P, Q, full, empty, done = allocate(BM, BN, BK, SLOTS, dy0, x0)
        gl.warp_specialize(
            [
                (_math, (
                    P, Q, full, empty, done, ends, across, salts, M, scalars_ptr, seed_ptr,
                    SCALARS, RULE, STOCHASTIC, smem,
                )),
                (loader, (dy, x, w, m, v, ends, across, M, P, Q, full, empty, False)),
                (storer, (w, m, v, ends, across, M, P, Q, done, empty, False)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    if behind != 0:
        wait_for_launches_in_front()


def wgrad_update_hopper(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
    layout: Layout | None = None,
) -> None:
    """As :func:`forge.kernels.wgrad_update.wgrad_update`, for bf16 weights and two states.

    ``dys`` [M, N] and ``xs`` [M, K] are bf16, with rows aligned to 16 bytes, and have one M, at
    least 1; N is a multiple of 8, K of 256, and every salt of 256. The states of all targets are
    bf16; or int8 and uint8 codes, with exponents from an even address.

    ``layout``: how an SM's warps share the work, see ``Layout``; by default as in ``CHOICE``. The
    results are the same. ValueError: these states have no such layout.
    """
    codes = bool(targets[0].scales)
    kernel = _wgrad_update_hopper_int8_kernel if codes else _wgrad_update_hopper_kernel
    tokens = dys[0].shape[0]
    layout = _chosen(layout, tokens, "int8" if codes else "bf16")
    programs, options = _PROGRAMS[layout]
    device = targets[0].param.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        for start in range(0, len(targets), GROUPS.value):
            group = slice(start, start + GROUPS.value)
            tiles, arguments = _arguments(dys[group], xs[group], targets[group], layout)
            kernel[(min(programs * sms, tiles),)](
                *arguments,
                tokens,
                start,
                # Programs that take the place of others are not in step anyway.
                tokens * PAIR_DELAY if start == 0 else 0,
                scalars,
                seed if seed is not None else scalars,
                SCALARS=scalars.numel(),
                RULE=gluon_function(rule),
                STOCHASTIC=seed is not None,
                LAYOUT=layout,
                launch_pdl=True,
                **options,
            )


def _chosen(layout: Layout | None, tokens: int, states: str) -> Layout:
    """The layout asked for, or that of the table; raise the ValueError of an unknown one."""
    if layout is None:
        return next(name for most, name in CHOICE[states] if tokens <= most)
    known = [name for name in _PROGRAMS if name != "apart" or states == "int8"]
    if layout not in known:
        raise ValueError(f"layout: is {layout!r}, must be one of {', '.join(known)} or None")
    return layout


def _arguments(
    dys: Sequence[Tensor], xs: Sequence[Tensor], targets: Sequence[Target], layout: Layout
) -> tuple[int, list[Any]]:
    """Number of tiles; descriptors and geometry of each matrix, filled up to ``GROUPS``."""
    wide = layout == "wide"
    blocks, layouts = (BLOCKS, LAYOUTS) if wide else (PAIR_BLOCKS, PAIR_LAYOUTS)
    height, width = blocks[0][1], blocks[1][1]
    described, geometry, tiles = [], [], 0
    for dy, x, target in zip(dys, xs, targets, strict=True):
        rows, columns = target.param.shape
        tiles += triton.cdiv(rows, height) * (columns // width)
        # The kernel of codes also takes the height, and the exponents of a row of a tile as a
        # number.
        exponents = [s.view(torch.uint16) if wide else s for s in target.scales]
        extra = (rows, *exponents) if target.scales else ()
        geometry.append((tiles, columns // width, target.salt, *extra))
        # Two codes are copied as one number of 16 bits.
        states = [s.view(torch.bfloat16) for s in target.states]
        described.append(
            [
                TensorDescriptor.from_tensor(t, block, smem)
                for t, block, smem in zip(
                    (dy, x, target.param, *states), blocks, layouts, strict=True
                )
            ]
        )
    arguments = []
    for column in (*zip(*described, strict=True), *zip(*geometry, strict=True)):
        arguments += [*column, *[column[-1]] * (GROUPS.value - len(targets))]
    return tiles, arguments

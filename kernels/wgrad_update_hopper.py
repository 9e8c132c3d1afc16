"""Weight gradient and optimizer update in one kernel, for Hopper: everything overlaps.

    dW = dY^T X;  w, states = rule(w, dW, states, scalars)

The same as kernels/wgrad_update.py, with the same random bits. Shapes: dY [M, N], X [M, K]; w and
both states [N, K], bf16, contiguous; K a multiple of 256, N of 8.

Persistent, one program an SM, tiles of 128 x 256, eight math warps, one load warp, one store warp.
One ring of four slots of 48 KB: a slot holds dY | X of one step of 64 tokens, or w | both states of
one 128 x 64 chunk of the tile (the same bytes), so the states are requested while the last steps
are multiplied, and the next tile's operands while the update runs. The math warps update a chunk in
place in its slot; only the store warp waits for stores.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.runtime import Dual
from forge.kernels.target import Target

GROUPS = 4  # matrices a launch: with more, its arguments pass 4 KB, which costs 0.3 ms in 1.6
BM, BN, BK = 64, 128, 256  # tokens a step, tile of dW
CHUNK = 64  # columns of the tile updated at a time
SLOTS = 4

_GROUPS = gl.constexpr(GROUPS)
_BM = gl.constexpr(BM)
_BN = gl.constexpr(BN)
_BK = gl.constexpr(BK)
_CHUNK = gl.constexpr(CHUNK)
_SLOTS = gl.constexpr(SLOTS)


# Renamed after Triton 3.6.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


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


@cache
def gluon_rule(rule: Dual) -> Any:
    """The rule's update as a Gluon function: the same source with Gluon's names."""
    fn = rule.torch
    names = {**fn.__globals__, "sqrt": _sqrt, "divide": _divide, "where": _where}
    names |= {"sign": _sign, "gl": gl}
    return gluon.jit(types.FunctionType(fn.__code__, names, fn.__name__))


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
def _widen(x):
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
def _as(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory as a bf16 array of another shape."""
    if _PUBLIC:
        return memory.reinterpret(gl.bfloat16, shape, layout)
    else:
        return memory._reinterpret(gl.bfloat16, shape, layout)


@gluon.jit
def _halves(x):
    """Left and right half of the columns: registers only."""
    a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return a, b


@gluon.jit
def _load_group(dy, x, w, s0, s1, tile, first, end, it, M, tiles_k, P, Q, full, empty):
    """Request operands and states of this program's tiles of one matrix."""
    layout: gl.constexpr = w.layout
    while tile < end:
        row = (tile - first) // tiles_k * _BN
        column = (tile - first) % tiles_k * _BK
        for m in range(0, M, _BM):
            i = it % _SLOTS
            mbarrier.wait(empty.index(i), ((it // _SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(i), _BM * (_BN + _BK) * 2)
            _tma_load(dy, [m, row], full.index(i), P.index(i))
            _tma_load(x, [m, column], full.index(i), Q.index(i))
            it += 1
        for c in gl.static_range(_BK // _CHUNK):
            i = it % _SLOTS
            mbarrier.wait(empty.index(i), ((it // _SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(i), 3 * _BN * _CHUNK * 2)
            at = column + c * _CHUNK
            pair = _as(Q.index(i), [2, _BN, _CHUNK], layout)
            wb = _as(P.index(i), [_BN, _CHUNK], layout)
            _tma_load(w, [row, at], full.index(i), wb)
            _tma_load(s0, [row, at], full.index(i), pair.index(0))
            _tma_load(s1, [row, at], full.index(i), pair.index(1))
            it += 1
        tile += gl.num_programs(0)
    return tile, it


@gluon.jit
def _store_group(w, s0, s1, tile, first, end, n, M, tiles_k, P, Q, done, empty):
    """Write back the updated chunks of this program's tiles of one matrix; free their slots."""
    layout: gl.constexpr = w.layout
    chunks: gl.constexpr = _BK // _CHUNK
    steps = (M + _BM - 1) // _BM
    while tile < end:
        row = (tile - first) // tiles_k * _BN
        column = (tile - first) % tiles_k * _BK
        for c in gl.static_range(chunks):
            i = (n * (steps + chunks) + steps + c) % _SLOTS
            count = n * chunks + c
            mbarrier.wait(done.index(count % _SLOTS), (count // _SLOTS) & 1)
            at = column + c * _CHUNK
            pair = _as(Q.index(i), [2, _BN, _CHUNK], layout)
            wb = _as(P.index(i), [_BN, _CHUNK], layout)
            _tma_store(w, [row, at], wb)
            _tma_store(s0, [row, at], pair.index(0))
            _tma_store(s1, [row, at], pair.index(1))
            tma.store_wait(pendings=0)
            mbarrier.arrive(empty.index(i), count=1)
        n += 1
        tile += gl.num_programs(0)
    return tile, n


@gluon.jit
def _loader(dy, x, w, s0, s1, ends, across, M, P, Q, full, empty):
    tile = gl.program_id(0)
    it = 0
    for j in gl.static_range(_GROUPS):
        first = ends[j - 1] if j > 0 else 0
        tile, it = _load_group(
            dy[j],
            x[j],
            w[j],
            s0[j],
            s1[j],
            tile,
            first,
            ends[j],
            it,
            M,
            across[j],
            P,
            Q,
            full,
            empty,
        )


@gluon.jit
def _storer(w, s0, s1, ends, across, M, P, Q, done, empty):
    tile = gl.program_id(0)
    n = 0
    for j in gl.static_range(_GROUPS):
        first = ends[j - 1] if j > 0 else 0
        tile, n = _store_group(
            w[j], s0[j], s1[j], tile, first, ends[j], n, M, across[j], P, Q, done, empty
        )


@gluon.jit
def _update_chunk(
    acc, c: gl.constexpr, base, pitch, it, n, seed, scalars, P, Q, full, done,
    RULE: gl.constexpr, STOCHASTIC: gl.constexpr, smem: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    i = (it + c) % _SLOTS
    mbarrier.wait(full.index(i), ((it + c) // _SLOTS) & 1)
    wb = _as(P.index(i), [_BN, _CHUNK], smem)
    pair = _as(Q.index(i), [2, _BN, _CHUNK], smem)
    states = (_widen(pair.index(0).load(layout)), _widen(pair.index(1).load(layout)))
    w, states = RULE(_widen(wb.load(layout)), acc, states, scalars)
    if STOCHASTIC:
        # base is a multiple of 256 and the column is below it: xor is the sum, and the compiler
        # cannot reassociate it into one address register for every element.
        rows = gl.arange(0, _BN, layout=gl.SliceLayout(1, layout)) * pitch + base
        columns = gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, layout)) + c * _CHUNK
        numbers = (rows.to(gl.uint32) ^ seed)[:, None] ^ columns.to(gl.uint32)[None, :]
        w, m, v = _stochastic_bf16(w, states[0], states[1], numbers)
        wb.store(w)
        pair.index(0).store(m)
        pair.index(1).store(v)
    else:
        wb.store(w.to(gl.bfloat16))
        pair.index(0).store(states[0].to(gl.bfloat16))
        pair.index(1).store(states[1].to(gl.bfloat16))
    fence_async_shared()
    _barrier()
    mbarrier.arrive(done.index((n + c) % _SLOTS), count=1)


@gluon.jit
def _math(
    P, Q, full, empty, done, ends, across, salts, M, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
    smem: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, _BK, 16]
    )
    chunk: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, _CHUNK, 16]
    )
    chunks: gl.constexpr = _BK // _CHUNK
    scalars = ()
    for j in gl.static_range(SCALARS):
        scalars = scalars + (gl.load(scalars_ptr + j),)
    seed = gl.load(seed_ptr).to(gl.uint32)
    it = 0
    n = 0
    for tile in range(gl.program_id(0), ends[_GROUPS - 1], gl.num_programs(0)):
        acc = gl.zeros((_BN, _BK), dtype=gl.float32, layout=mma)
        for m in range(0, M, _BM):
            i = it % _SLOTS
            mbarrier.wait(full.index(i), (it // _SLOTS) & 1)
            acc = warpgroup_mma(P.index(i).permute((1, 0)), Q.index(i), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((it + _SLOTS - 1) % _SLOTS), count=1, pred=m > 0)
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + _SLOTS - 1) % _SLOTS), count=1, pred=M > 0)
        # Where this tile begins: matrix, row and column as one 32-bit index, salted.
        first = 0
        tk = across[0]
        salt = salts[0]
        for j in gl.static_range(1, _GROUPS):
            beyond = tile >= ends[j - 1]
            first = gl.where(beyond, ends[j - 1], first)
            tk = gl.where(beyond, across[j], tk)
            salt = gl.where(beyond, salts[j], salt)
        pitch = tk * _BK
        base = (tile - first) // tk * _BN * pitch + (tile - first) % tk * _BK + salt
        left, right = _halves(acc)
        q0, q1 = _halves(left)
        q2, q3 = _halves(right)
        quarters = (q0, q1, q2, q3)
        for c in gl.static_range(chunks):
            _update_chunk(
                quarters[c], c, base, pitch, it, n, seed, scalars, P, Q, full, done,
                RULE, STOCHASTIC, smem, chunk,
            )  # fmt: skip
        it += chunks
        n += chunks


@gluon.jit
def _wait_for_launches_in_front():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


_INTEGERS = [f"{name}{j}" for name in "eka" for j in range(GROUPS)] + ["M", "behind"]


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
    M, behind, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    # Launches overlap (programmatic dependent launch): the next one may take each SM as it becomes
    # free. The first of a chain reads nothing before the kernels in front of it, which wrote its
    # operands, have ended, and lets no other start before that; so those behind it, whose operands
    # are as old, need not wait. They wait at their end: a kernel that follows the chain waits for
    # the last launch alone.
    if behind == 0:
        _wait_for_launches_in_front()
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    dy = (dy0, dy1, dy2, dy3)
    x = (x0, x1, x2, x3)
    w = (w0, w1, w2, w3)
    m = (m0, m1, m2, m3)
    v = (v0, v1, v2, v3)
    ends = (e0, e1, e2, e3)
    across = (k0, k1, k2, k3)
    salts = (a0, a1, a2, a3)
    P = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, _BM, _BN], dy[0].layout)
    Q = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, _BM, _BK], x[0].layout)
    full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    smem: gl.constexpr = w[0].layout
    gl.warp_specialize(
        [
            (_math, (
                P, Q, full, empty, done, ends, across, salts, M, scalars_ptr, seed_ptr,
                SCALARS, RULE, STOCHASTIC, smem,
            )),
            (_loader, (dy, x, w, m, v, ends, across, M, P, Q, full, empty)),
            (_storer, (w, m, v, ends, across, M, P, Q, done, empty)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
    if behind != 0:
        _wait_for_launches_in_front()


def _layout(shape: list[int]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)


_BLOCKS = ([BM, BN], [BM, BK], [BN, CHUNK], [BN, CHUNK], [BN, CHUNK])
LAYOUTS = tuple(_layout(block) for block in _BLOCKS)


def wgrad_update_hopper(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    """As :func:`forge.kernels.wgrad_update.wgrad_update`, for bf16 weights and two bf16 states.

    ``dys`` [M, N] and ``xs`` [M, K] are bf16, with rows aligned to 16 bytes, and have one M, at
    least 1; N is a multiple of 8, K of 256, and every salt of 256.
    """
    device = targets[0].param.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        for start in range(0, len(targets), GROUPS):
            group = slice(start, start + GROUPS)
            tiles, arguments = _arguments(dys[group], xs[group], targets[group])
            _wgrad_update_hopper_kernel[(min(sms, tiles),)](
                *arguments,
                dys[0].shape[0],
                start,
                scalars,
                seed if seed is not None else scalars,
                SCALARS=scalars.numel(),
                RULE=gluon_rule(rule),
                STOCHASTIC=seed is not None,
                num_warps=8,
                launch_pdl=True,
            )


def _arguments(
    dys: Sequence[Tensor], xs: Sequence[Tensor], targets: Sequence[Target]
) -> tuple[int, list[Any]]:
    """Number of tiles; descriptors and geometry of each matrix, filled up to ``GROUPS``."""
    described, ends, across, salts, tiles = [], [], [], [], 0
    for dy, x, target in zip(dys, xs, targets, strict=True):
        rows, columns = target.param.shape
        tiles += triton.cdiv(rows, BN) * (columns // BK)
        ends.append(tiles)
        across.append(columns // BK)
        salts.append(target.salt)
        tensors = (dy, x, target.param, *target.states)
        described.append(
            [
                TensorDescriptor.from_tensor(t, block, layout)
                for t, block, layout in zip(tensors, _BLOCKS, LAYOUTS, strict=True)
            ]
        )
    arguments = []
    for column in (*zip(*described, strict=True), ends, across, salts):
        arguments += [*column, *[column[-1]] * (GROUPS - len(targets))]
    return tiles, arguments

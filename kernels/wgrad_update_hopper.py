"""Weight gradient and optimizer update in one kernel, for Hopper: everything overlaps.

    dW = dY^T X;  w, states = rule(w, dW, states, scalars)

The same as kernels/wgrad_update.py, with the same random bits. Shapes: dY [M, N], X [M, K]; w and
both states [N, K], contiguous; dY, X and w bf16, the states bf16 or 8-bit codes; K a multiple of
256, N of 8.

How the kernels are built is in kernels/hopper_ring.py, with two programs an SM in
kernels/hopper_pair.py, with warps that only update in kernels/hopper_apart.py. Here are the kernel
of bf16 states and the function that launches it or, for 8-bit states, that of
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

from forge.kernels.hopper_apart import (
    APART_SLOTS,
    STATE_PIECES,
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
from forge.kernels.hopper_chunks import update_chunk
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
)
from forge.kernels.runtime import Dual
from forge.kernels.target import Target
from forge.kernels.wgrad_update_hopper_int8 import _wgrad_update_hopper_int8_kernel

# wide: one program an SM, tiles of 128 x 256, eight warps that multiply a tile, then update it.
# pair: two programs an SM, tiles of 128 x 128, four such warps each. apart: one program, tiles of
# 128 x 128, warps that multiply and warps that update.
Layout = Literal["wide", "pair", "apart"]
# The layout up to so many tokens, with bf16 states and with codes. Measured at 512, 1024 and 4096:
# results/LOG.md; apart is not measured yet.
CHOICE: dict[str, tuple[tuple[float, Layout], ...]] = {
    "bf16": ((1024, "pair"), (math.inf, "wide")),
    "int8": ((1024, "pair"), (math.inf, "wide")),
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
            update_chunk(
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
                update_chunk(
                    chunks[c], w[c], m[c], v[c], half * HALF, c * CHUNK, base, pitch, seed, scalars,
                    RULE, STOCHASTIC,
                )  # fmt: skip
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done.index(n % DONES), count=1)
            it += PART
            n += 1


@gluon.jit
def _apart_update(
    S, full, G, given, taken, done, ends, across, salts, scalars_ptr, seed_ptr,
    SCALARS: gl.constexpr, RULE: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    scalars, seed = load_scalars(scalars_ptr, seed_ptr, SCALARS)
    it = 0
    for tile in range(gl.program_id(0), ends[GROUPS - 1], gl.num_programs(0)):
        first, tk, salt = place(tile, ends, across, salts)
        pitch = tk * PAIR_BK
        base = (tile - first) // tk * PAIR_BN * pitch + (tile - first) % tk * PAIR_BK + salt
        for half in range(2):
            chunks = halves(take_gradient(it, G, given, taken))
            i = wait_full(it, full) * STATE_PIECES
            for c in gl.static_range(2):
                update_chunk(
                    chunks[c], S.index(i + c), S.index(i + 2 + c), S.index(i + 4 + c),
                    0, c * CHUNK, base + half * HALF * pitch, pitch, seed, scalars,
                    RULE, STOCHASTIC,
                )  # fmt: skip
            finish(it, done)
            it += 1


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
    if LAYOUT == "apart":
        P, Q, full, empty, done = allocate(PAIR_BM, PAIR_BN, PAIR_BK, APART_SLOTS, dy0, x0)
        S, loaded, stored, G, given, taken = allocate_states(False)
        gl.warp_specialize(
            [
                (_apart_update, (
                    S, loaded, G, given, taken, done, ends, across, salts,
                    scalars_ptr, seed_ptr, SCALARS, RULE, STOCHASTIC,
                )),
                (multiplier, (ends, M, P, Q, full, empty, G, given, taken)),
                (operand_loader, (dy, x, ends, across, M, P, Q, full, empty)),
                (state_loader, (w, m, v, ends, across, S, loaded, stored, False)),
                (apart_storer, (w, m, v, ends, across, S, stored, done, False)),
            ],
            WORKER_WARPS,
            WORKER_REGISTERS,
        )  # fmt: skip
    elif LAYOUT == "pair":
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
    results are the same. ValueError: there is no such layout.
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
    if layout not in _PROGRAMS:
        raise ValueError(f"layout: is {layout!r}, must be one of {', '.join(_PROGRAMS)} or None")
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

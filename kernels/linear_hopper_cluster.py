"""The products of kernels/linear_hopper.py by pairs of programs that share W: a cluster of two.

A pair has 256 tokens, a program 128 of them, of the same columns. Each loads half of a slot of W
for both (multicast): with tiles of 128 columns three quarters of the bytes leave L2, with 256 two
thirds.

Triton 3.6 launches clusters, but has neither a multicast load nor an arrival at the other program's
barrier. Both are PTX here, which needs addresses: of the descriptor of W, a parameter whose name
follows from the kernel's, and in shared memory, where the compiler puts one array behind the other,
larger ones first.
:func:`is_placed` reads from its output whether it did; a kernel of which that is not true is not
launched.

Barriers, in each program: ``full`` of a slot completes when x and both halves of W are there;
``empty`` when both programs have read the slot, since each writes to both.
"""

from __future__ import annotations

import re
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

from forge.kernels.hopper_ring import (
    thread_barrier,
    tma_load,
    tma_store,
    view,
    wait_for_launches_in_front,
)
from forge.kernels.linear_auto import TOKENS, Tile
from forge.kernels.linear_hopper import let_next_start, load_first_rows


def multicast_by(kernel: str) -> gl.constexpr:
    """The load of half a slot to both programs, in a kernel of this name, whose second argument
    describes W."""
    return gl.constexpr(_MULTICAST.replace("KERNEL", kernel))


# $1, $2 offsets of the half slot and its barrier; $3, $4 coordinates, inner first; $5 whether.
_MULTICAST = """{
.reg .pred p, q; .reg .b32 t, slot, bar; .reg .b16 both; .reg .b64 map;
mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.and.u32 q, $5, 0, p;
mov.u32 slot, global_smem; add.u32 bar, slot, $2; add.u32 slot, slot, $1; mov.b16 both, 3;
mov.b64 map, KERNEL_param_5; cvta.param.u64 map, map;
@q cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [slot], [map, {$3, $4}], [bar], both;
mov.u32 $0, 0;
}"""  # noqa: E501
_LOAD_HALF = multicast_by("_linear_cluster_kernel")
# $1 offset of a barrier, $2 whether. Not released to the cluster, for which the compiler fences all
# memory: it tells that tensor cores have read a slot, and nothing was written.
_ARRIVE_AT_OTHER = gl.constexpr("""{
.reg .pred p, q; .reg .b32 t, bar, rank;
mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.and.u32 q, $2, 0, p;
mov.u32 bar, global_smem; add.u32 bar, bar, $1;
mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1;
mapa.shared::cluster.u32 bar, bar, rank;
@q mbarrier.arrive.shared::cluster.b64 _, [bar];
mov.u32 $0, 0;
}""")


@gluon.jit
def _meet():
    """Both programs of the pair; barriers that one has made are seen by the other.

    They need not meet again: whatever one sends, the other waits for.
    """
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; "
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _multicast(slot_at, barrier_at, inner, outer, pred, LOAD: gl.constexpr):
    gl.inline_asm_elementwise(
        LOAD, "=r,r,r,r,r,r", [slot_at, barrier_at, inner, outer, pred],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_half(
    slot_at, barrier_at, term, column, pred,
    BK: gl.constexpr, BN: gl.constexpr, DX: gl.constexpr, LOAD: gl.constexpr,
):  # fmt: skip
    """Half a slot of W, to both programs. The engine copies boxes of 128 bytes a row."""
    if DX:
        for j in gl.static_range(BN // 128):
            at = slot_at + j * BK * 128
            _multicast(at, barrier_at, column + j * 64, term, pred, LOAD)
    else:
        _multicast(slot_at, barrier_at, term, column, pred, LOAD)


@gluon.jit
def _arrive_at_other(barrier_at, pred):
    gl.inline_asm_elementwise(
        _ARRIVE_AT_OTHER, "=r,r,r", [barrier_at, pred], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rank_of():
    """Which of the pair this program is: 0 or 1."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def cluster_ring(x, w, SLOTS: gl.constexpr, BN: gl.constexpr, DX: gl.constexpr):
    """Slots for x and all of W, and their barriers, which both programs have made."""
    BM: gl.constexpr = x.block_shape[0]
    BK: gl.constexpr = x.block_shape[1]
    one_each: gl.constexpr = mbarrier.MBarrierLayout(cga_layout=[[0]])
    X = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BM, BK], x.layout)
    if DX:
        W = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BK, BN], w.layout)
    else:
        W = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BN, BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one_each)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], one_each)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(empty.index(i), count=2)
    thread_barrier()
    _meet()
    return X, W, full, empty


@gluon.jit
def load_first_halves(
    half, term, steps, X, W, full, MORE: gl.constexpr, DX: gl.constexpr, LOAD: gl.constexpr
):
    """Request W of the first turn: this program's half, from column ``half`` on.

    ``MORE`` bytes of shared memory lie between the ring and its barriers.
    """
    SLOTS: gl.constexpr = X.shape[0]
    BK: gl.constexpr = X.shape[2]
    BN: gl.constexpr = W.shape[2] if DX else W.shape[1]
    x_bytes: gl.constexpr = X.shape[1] // 2 * BK * 2
    w_bytes: gl.constexpr = BN * BK * 2
    FULL_AT: gl.constexpr = SLOTS * (x_bytes + w_bytes) + MORE
    W_AT: gl.constexpr = SLOTS * x_bytes if w_bytes <= x_bytes else 0
    half_at = W_AT + rank_of() * (w_bytes // 2)
    for i in gl.static_range(SLOTS):
        mbarrier.expect(full.index(i), x_bytes + w_bytes, pred=i < steps)
        at = half_at + i * w_bytes
        pred = (i < steps).to(gl.int32)
        _load_half(at, FULL_AT + 8 * i, term + i * BK, half, pred, BK, BN, DX, LOAD)


@gluon.jit
def multiply_cluster(
    x, row, half, term, steps, X, W, full, empty,
    MORE: gl.constexpr, DX: gl.constexpr, LOAD: gl.constexpr,
):  # fmt: skip
    """The pair's sum of ``steps`` slots from ``term`` on, fp32; the first turn is under way."""
    SLOTS: gl.constexpr = X.shape[0]
    BM: gl.constexpr = X.shape[1]
    BK: gl.constexpr = X.shape[2]
    BN: gl.constexpr = W.shape[2] if DX else W.shape[1]
    x_bytes: gl.constexpr = BM // 2 * BK * 2
    w_bytes: gl.constexpr = BN * BK * 2
    FULL_AT: gl.constexpr = SLOTS * (x_bytes + w_bytes) + MORE
    EMPTY_AT: gl.constexpr = FULL_AT + (SLOTS + 1) // 2 * 16
    W_AT: gl.constexpr = SLOTS * x_bytes if w_bytes <= x_bytes else 0
    half_at = W_AT + rank_of() * (w_bytes // 2)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16], cga_layout=[[1, 0]]
    )
    acc = gl.zeros((BM, BN), dtype=gl.float32, layout=mma)
    for s in range(0, steps):
        now = s % SLOTS
        mbarrier.wait(full.index(now), (s // SLOTS) & 1)
        terms = W.index(now) if DX else W.index(now).permute((1, 0))
        acc = warpgroup_mma(X.index(now), terms, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        # Both warpgroups have read the slot of the step before; so must the other program.
        thread_barrier()
        ahead = s + SLOTS - 1
        more = (s > 0) & (ahead < steps)
        pred = more.to(gl.int32)
        free = ahead % SLOTS
        mbarrier.arrive(empty.index(free), count=1, pred=more)
        _arrive_at_other(EMPTY_AT + 8 * free, pred)
        mbarrier.wait(empty.index(free), (ahead // SLOTS + 1) & 1, pred=more)
        at = term + ahead * BK
        mbarrier.expect(full.index(free), x_bytes + w_bytes, pred=more)
        slot_at, full_at = half_at + free * w_bytes, FULL_AT + 8 * free
        _load_half(slot_at, full_at, at, half, pred, BK, BN, DX, LOAD)
        tma_load(x, [row, at], full.index(free), X.index(free), pred=more)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    # Every slot has been read, and no load is under way: the ring may be used for the result.
    thread_barrier()
    return acc


@gluon.jit(do_not_specialize=["steps", "part_steps", "part_rows"])
def _linear_cluster_kernel(
    x, w, y, steps, part_steps, part_rows,
    SLOTS: gl.constexpr, DX: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Grid: of pairs, else as in kernels/linear_hopper.py; ``w`` describes half a slot."""
    BM: gl.constexpr = x.block_shape[0]
    BN: gl.constexpr = y.block_shape[1]
    row = gl.program_id(0) * BM
    column = gl.program_id(1) * BN
    half = column + rank_of() * (BN // 2)
    first = gl.program_id(2) * part_steps
    term = first * x.block_shape[1]
    count = gl.minimum(steps - first, part_steps)  # none or fewer, if the last parts have none
    X, W, full, empty = cluster_ring(x, w, SLOTS, BN, DX)
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_halves(half, term, count, X, W, full, 0, DX, _LOAD_HALF)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(x, row, term, count, X, full)
    acc = multiply_cluster(x, row, half, term, count, X, W, full, empty, 0, DX, _LOAD_HALF)
    layout: gl.constexpr = y.layout
    out = view(X, gl.bfloat16, [BM, BN], layout)
    out.store(acc.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    tma_store(y, [row + gl.program_id(2) * part_rows, column], out)
    tma.store_wait(pendings=0)


def blocks(tile: Tile, dx: bool) -> list[list[int]]:
    """Of x or dy, half of W and the result, as pairs copy them."""
    half = tile.columns // 2
    weight = [tile.terms, half] if dx else [half, tile.terms]
    return [[2 * TOKENS, tile.terms], weight, [2 * TOKENS, tile.columns]]


def divided(rows: bool) -> gl.NVMMASharedLayout:
    """Rows divided among a pair, or all of them in both programs."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=[[int(rows), 0]]
    )


def layouts() -> list[gl.NVMMASharedLayout]:
    """Of x, W and the result."""
    return [divided(True), divided(False), divided(True)]


def is_placed(ptx: str, name: str, columns: int, slots: int, more: int = 0) -> bool:
    """Whether shared memory and parameters lie where the PTX of this file expects them.

    Args:
        ptx: of the kernel ``name``.
        columns, slots: of a program's tile, 64 terms a slot.
        more: bytes between the ring and its barriers.
    """
    x_bytes, w_bytes = TOKENS * 128, columns * 128  # of a slot
    full = slots * (x_bytes + w_bytes) + more
    empty = full + (slots + 1) // 2 * 16
    barriers = [full + 8 * i for i in range(slots)] + [empty + 8 * i for i in range(slots)]
    found = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    made = [found.get(r) for r in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)]
    # The second slot of x; then what is loaded behind the ring. W has what is left.
    loads = [found.get(r) for r in re.findall(r"complete_tx::bytes \[(%r\d+)\]", ptx)]
    x_at = slots * w_bytes if w_bytes > x_bytes else 0
    maps = re.findall(r"\.param \.align \d+ \.b8 (\w+)\[128\]", ptx)
    return (
        made[: 2 * slots] == [str(b) for b in barriers]
        and loads[1] == str(x_at + x_bytes)
        and (more == 0 or loads[slots] == str(full - more))
        and maps[1] == f"{name}_param_5"
    )


def launch_clusters(a: Tensor, weight: Tensor, dx: bool, tile: Tile, prefetch: bool) -> Tensor:
    """As :func:`forge.kernels.linear_hopper.launch`; the tile is a program's.

    Raises:
        RuntimeError: as :func:`run_clusters`.
        ValueError: the tile has other than 128 or 256 columns or 64 terms.
    """
    if tile.terms != 64 or tile.columns not in (128, 256):
        raise ValueError(f"{tile}: a pair needs 128 or 256 columns and 64 terms, or cluster=False")
    rows, columns = a.shape[0], weight.shape[1 if dx else 0]
    steps = triton.cdiv(a.shape[1], tile.terms)
    height = rows if tile.parts == 1 else triton.cdiv(rows, 2 * TOKENS) * 2 * TOKENS
    y = torch.empty((tile.parts, height, columns), dtype=a.dtype, device=a.device)
    if rows:
        described = [
            TensorDescriptor.from_tensor(t, block, layout)
            for t, block, layout in zip(
                (a, weight, y.view(-1, columns)), blocks(tile, dx), layouts(), strict=True
            )
        ]
        grid = (triton.cdiv(rows, 2 * TOKENS), triton.cdiv(columns, tile.columns), tile.parts)
        arguments = (*described, steps, triton.cdiv(steps, tile.parts), height)
        options = dict(SLOTS=tile.slots, DX=dx, PREFETCH=prefetch)
        with torch.cuda.device(a.device):
            run_clusters(_linear_cluster_kernel, grid, arguments, options, tile.columns)
    return y[:, :rows]


_checked: set[Any] = set()


def run_clusters(
    kernel: Any, grid: Any, arguments: Any, options: dict[str, Any], columns: int, more: int = 0
) -> None:
    """Launch a kernel of this file's functions once :func:`is_placed` has looked at it.

    Raises:
        RuntimeError: the compiler placed something else where this file's PTX expects its arrays.
    """
    launch = options | dict(num_warps=8, num_ctas=2, launch_pdl=True)
    name = kernel.fn.__name__
    key = (name, columns, torch.cuda.current_device(), *options.values())
    if key not in _checked:
        compiled = kernel.warmup(*arguments, grid=grid, **launch)
        if not is_placed(compiled.asm["ptx"], name, columns, options["SLOTS"], more):
            raise RuntimeError(f"{name}: Triton {triton.__version__} places its arrays otherwise")
        _checked.add(key)
    kernel[grid](*arguments, **launch)

"""Products of a linear layer for Hopper: forward and input gradient of few tokens.

    y = x W^T          x [T, K], W [N, K], y [T, N]
    dx = dy W          dy [T, N], W [N, K], dx [T, K]

bf16 in, fp32 sums, bf16 out. With 512 tokens such a product takes 3 to 12 us. What counts is how
soon its first operands are there, how many bytes go from L2 to the multiprocessors, and that all of
them work. So every program has one tile, all programs run at once, and a table says which tile
(kernels/linear_auto.py). A sum of many terms for few outputs is split: its parts, bf16, are to be
added by who reads them.

Two warpgroups multiply and fill a ring of slots by the tensor memory engine; a slot is 64 or 128
terms of x | W. Its barrier ``full`` completes when its bytes are there. There is no load warp: the
compiler lets both warpgroups meet at every step anyway, and half as many registers again would be
paid for it; with them a program could not begin beside those of the kernel in front.

Programmatic dependent launch: a kernel may be launched once every program of the one in front has
let it, and ``griddepcontrol.wait`` returns when the one in front has ended. Kernels of this package
wait before they let the next one start. So who is launched behind such a kernel knows that all in
front of *that* has ended, and may read what is as old before its own wait: here the first slots of
W. That is wrong for weights written by the launch directly in front, or by a chain of updates in
front, whose launches overlap (kernels/hopper_ring.py): hence ``prefetch``.
"""

from __future__ import annotations

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
from forge.kernels.linear_auto import BACKWARD, FORWARD, OTHER, TOKENS, Tile
from forge.kernels.runtime import as_rows


@gluon.jit
def let_next_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_weight(w, term, column, barrier, slot, DX: gl.constexpr, pred):
    """One slot of W: columns of the result from ``column`` on."""
    if DX:
        tma_load(w, [term, column], barrier, slot, pred=pred)
    else:
        tma_load(w, [column, term], barrier, slot, pred=pred)


@gluon.jit
def make_ring(x, w, SLOTS: gl.constexpr):
    """Slots for blocks of x and of W, and their barriers."""
    X = gl.allocate_shared_memory(gl.bfloat16, [SLOTS] + x.block_shape, x.layout)
    W = gl.allocate_shared_memory(gl.bfloat16, [SLOTS] + w.block_shape, w.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    return X, W, full


@gluon.jit
def load_first_weights(w, column, term, steps, X, W, full, DX: gl.constexpr):
    """Request W of the first turn of the ring."""
    SLOTS: gl.constexpr = X.shape[0]
    # Of x and W.
    bytes: gl.constexpr = (X.shape[1] * X.shape[2] + W.shape[1] * W.shape[2]) * 2
    for i in gl.static_range(SLOTS):
        mbarrier.expect(full.index(i), bytes, pred=i < steps)
        at = term + i * X.shape[2]
        _load_weight(w, at, column, full.index(i), W.index(i), DX, i < steps)


@gluon.jit
def load_first_rows(x, row, term, steps, X, full):
    """Request x of the first turn of the ring."""
    SLOTS: gl.constexpr = X.shape[0]
    for i in gl.static_range(SLOTS):
        at = term + i * X.shape[2]
        tma_load(x, [row, at], full.index(i), X.index(i), pred=i < steps)


@gluon.jit
def multiply(x, w, row, column, term, steps, X, W, full, DX: gl.constexpr):
    """The tile's sum of ``steps`` slots from ``term`` on, fp32; the first turn is under way."""
    SLOTS: gl.constexpr = X.shape[0]
    BM: gl.constexpr = X.shape[1]
    BK: gl.constexpr = X.shape[2]
    BN: gl.constexpr = W.shape[2] if DX else W.shape[1]
    bytes: gl.constexpr = (X.shape[1] * X.shape[2] + W.shape[1] * W.shape[2]) * 2
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16]
    )
    acc = gl.zeros((BM, BN), dtype=gl.float32, layout=mma)
    for s in range(0, steps):
        now = s % SLOTS
        mbarrier.wait(full.index(now), (s // SLOTS) & 1)
        terms = W.index(now) if DX else W.index(now).permute((1, 0))
        acc = warpgroup_mma(X.index(now), terms, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        # Both warpgroups have read the slot of the step before: it is filled again.
        thread_barrier()
        ahead = s + SLOTS - 1
        more = (s > 0) & (ahead < steps)
        free = ahead % SLOTS
        at = term + ahead * BK
        mbarrier.expect(full.index(free), bytes, pred=more)
        _load_weight(w, at, column, full.index(free), W.index(free), DX, more)
        tma_load(x, [row, at], full.index(free), X.index(free), pred=more)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    # Every slot has been read, and no load is under way: the ring may be used for the result.
    thread_barrier()
    return acc


@gluon.jit(do_not_specialize=["steps", "part_steps", "part_rows"])
def _linear_hopper_kernel(
    x, w, y, steps, part_steps, part_rows,
    SLOTS: gl.constexpr, DX: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens, tiles of columns, parts of the sum, of ``part_steps`` slots each.

    Part p of the result begins at row ``p * part_rows`` of y.
    """
    BM: gl.constexpr = x.block_shape[0]
    BN: gl.constexpr = y.block_shape[1]
    row = gl.program_id(0) * BM
    column = gl.program_id(1) * BN
    first = gl.program_id(2) * part_steps
    term = first * x.block_shape[1]
    count = gl.minimum(steps - first, part_steps)  # none or fewer, if the last parts have none
    X, W, full = make_ring(x, w, SLOTS)
    # Weights are older than the kernel in front, x is not.
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_weights(w, column, term, count, X, W, full, DX)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(x, row, term, count, X, full)
    acc = multiply(x, w, row, column, term, count, X, W, full, DX)
    layout: gl.constexpr = y.layout
    out = view(X, gl.bfloat16, [BM, BN], layout)
    out.store(acc.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    tma_store(y, [row + gl.program_id(2) * part_rows, column], out)
    tma.store_wait(pendings=0)


def linear_hopper(
    x: Tensor, weight: Tensor, *, parts: bool = False, prefetch: bool = False
) -> Tensor:
    """``x W^T`` on a Hopper GPU.

    Args:
        x: [..., K], bf16; rows that are not side by side, or not at multiples of 16 bytes, are
            copied.
        weight: [N, K], bf16, its rows at multiples of 16 bytes; N and K multiples of 8. Those of
            ``FORWARD`` have a tile of their own, chosen for 512 tokens; 1,024 or fewer are meant.
        parts: return bf16 [P, T, N], whose sum over P is the product, P as in ``FORWARD``. Each
            part is rounded once. Otherwise torch adds them.
        prefetch: weights may be read before the kernel in front has ended. Neither it, nor a chain
            of overlapping launches in front, may have written them; see the head of this file.

    Returns:
        [..., N], bf16; or the parts, which need not lie side by side.

    Raises:
        ValueError: shape, dtype, device or layout are none of these.
    """
    return _linear(x, weight, False, FORWARD, parts, prefetch)


def linear_hopper_dx(
    dy: Tensor, weight: Tensor, *, parts: bool = False, prefetch: bool = False
) -> Tensor:
    """``dy W``: as :func:`linear_hopper`, for ``dy`` [..., N]; tiles are those of ``BACKWARD``.

    Returns:
        [..., K], bf16; or the parts [P, T, K].

    Raises:
        ValueError: as :func:`linear_hopper`.
    """
    return _linear(dy, weight, True, BACKWARD, parts, prefetch)


def _linear(
    a: Tensor,
    weight: Tensor,
    dx: bool,
    tiles: dict[tuple[int, ...], Tile],
    parts: bool,
    prefetch: bool,
) -> Tensor:
    check_operands(a, weight, dx)
    tile = tiles.get((weight.shape[0], weight.shape[1]), OTHER)
    result = launch(aligned_rows(a), weight, dx, tile, prefetch)
    if parts:
        return result
    whole = result[0] if tile.parts == 1 else result.sum(0)
    return whole.view(*a.shape[:-1], whole.shape[1])


def check_operands(a: Tensor, weight: Tensor, dx: bool) -> None:
    """Raise the ValueError of operands that the kernel does not take."""
    name = "dy" if dx else "x"
    if weight.dim() != 2 or a.dim() < 1 or a.shape[-1] != weight.shape[0 if dx else 1]:
        raise ValueError(
            f"{name}: {tuple(a.shape)} does not go with a weight of {tuple(weight.shape)}: its "
            f"last dimension must be the weight's {'first' if dx else 'second'}"
        )
    for what, t in ((name, a), ("weight", weight)):
        if t.dtype != torch.bfloat16 or not t.is_cuda:
            raise ValueError(
                f"{what}: is {t.dtype} on {t.device}, must be torch.bfloat16 on a GPU: use F.linear"
            )
    if weight.stride(1) != 1 or not _is_aligned(weight):
        raise ValueError(
            f"weight: {tuple(weight.shape)} with strides {weight.stride()} must have rows of "
            "neighbours that begin at multiples of 16 bytes: pass weight.contiguous()"
        )
    if weight.shape[0] % 8 or weight.shape[1] % 8 or weight.numel() == 0:
        raise ValueError(f"weight: {tuple(weight.shape)} must be multiples of 8: use F.linear")


def aligned_rows(a: Tensor) -> Tensor:
    """``a`` as rows [T, C] that the tensor memory engine can read."""
    rows = as_rows(a)
    return rows if _is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def _is_aligned(t: Tensor) -> bool:
    """Whether rows begin where the tensor memory engine can read: at multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(0) > 0


def blocks(tile: Tile, dx: bool) -> list[list[int]]:
    """Of x or dy, the weight and the result, as the tensor memory engine copies them."""
    weight = [tile.terms, tile.columns] if dx else [tile.columns, tile.terms]
    return [[TOKENS, tile.terms], weight, [TOKENS, tile.columns]]


def layout_of(block: list[int]) -> gl.NVMMASharedLayout:
    """How a block lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)


def launch(a: Tensor, weight: Tensor, dx: bool, tile: Tile, prefetch: bool) -> Tensor:
    """The parts [P, T, N or K] of aligned rows ``a`` [T, K or N] by the kernel."""
    rows, columns = a.shape[0], weight.shape[1 if dx else 0]
    steps = triton.cdiv(a.shape[1], tile.terms)
    # A part has whole tiles, so that none of its rows are stored into the next one.
    height = rows if tile.parts == 1 else triton.cdiv(rows, TOKENS) * TOKENS
    y = torch.empty((tile.parts, height, columns), dtype=a.dtype, device=a.device)
    if rows:
        described = [
            TensorDescriptor.from_tensor(t, block, layout_of(block))
            for t, block in zip((a, weight, y.view(-1, columns)), blocks(tile, dx), strict=True)
        ]
        grid = (triton.cdiv(rows, TOKENS), triton.cdiv(columns, tile.columns), tile.parts)
        with torch.cuda.device(a.device):
            _linear_hopper_kernel[grid](
                *described,
                steps,
                triton.cdiv(steps, tile.parts),
                height,
                SLOTS=tile.slots,
                DX=dx,
                PREFETCH=prefetch,
                num_warps=8,
                launch_pdl=True,
            )
    return y[:, :rows]

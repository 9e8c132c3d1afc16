"""Cross-entropy and its gradient over the logits, for Hopper: every row is read about once.

    lse[t] = log sum_v exp(z[t, v]),    z[t, v] = (exp(z[t, v] - lse[t]) - [v = label[t]]) / count

as kernels/linear_cross_entropy.py has them. A row of 151,936 logits in bf16 is 304 KB, of which 224
KB stay in shared memory between the two passes over it. The others are read again, from L2.

Persistent, one program an SM, one ring of slots, blocks of 64 x 128 logits. Of a row's C blocks the
first C - SLOTS are read for the sum and make room for the last; the last SLOTS stay. Then those are
overwritten by their gradient and stored, in the order in which they came, and each makes room for a
first block that comes again, and after them for the next row's blocks. So slots are taken and given
back in one order: load g + SLOTS may begin when the use of load g has ended.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.hopper_ring import (
    thread_barrier,
    tma_load,
    tma_store,
    wait_for_launches_in_front,
)
from forge.kernels.linear_hopper import let_next_start

SLOTS = gl.constexpr(14)
WARPS = 16
# Of a block, and of the logits beside each other that a thread reads at once.
HEIGHT, WIDTH, VECTOR = gl.constexpr(64), gl.constexpr(128), gl.constexpr(8)
BLOCK = [1, HEIGHT.value, WIDTH.value]
LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for(BLOCK, gl.bfloat16))


@gluon.jit
def _load(z, g, chunks, uses, step, slots, full, tokens):
    """Request load ``g`` of this program: a block of one of its rows, if it has so many."""
    i = g // uses
    j = g - i * uses
    block = gl.where(j < chunks, j, j - chunks)
    row = gl.program_id(0) + i * step
    more = row < tokens
    slot = g % SLOTS
    mbarrier.expect(full.index(slot), HEIGHT * WIDTH * 2, pred=more)
    tma_load(z, [row, block * HEIGHT, 0], full.index(slot), slots.index(slot), pred=more)


@gluon.jit
def _read(slots, full, g, registers: gl.constexpr):
    """The logits of load ``g`` as fp32 [64, 16, 8]; the last dimension lies in one thread."""
    slot = g % SLOTS
    mbarrier.wait(full.index(slot), (g // SLOTS) & 1)
    x = slots.index(slot).load(registers).to(gl.float32)
    return x.reshape([HEIGHT, WIDTH // VECTOR, VECTOR])


@gluon.jit(do_not_specialize=["tokens", "first", "rows", "ignore_index"])
def _cross_entropy_hopper_kernel(
    z,  # [T, V / 128, 128], overwritten by its gradient
    z_ptr,
    labels_ptr,
    lse_ptr,  # fp32 [T]: of the columns before, if CONTINUED; then of these too
    target_ptr,  # fp32 [T]: the label's logit
    count_ptr,  # fp32 []: the gradient is divided by it
    tokens,
    first,  # the vocabulary entry of column 0
    rows,  # V / 128
    ignore_index,
    CONTINUED: gl.constexpr,
    WARPS: gl.constexpr,
):
    registers: gl.constexpr = gl.BlockedLayout(
        [1, 1, VECTOR], [1, 32 * VECTOR // WIDTH, WIDTH // VECTOR], [1, WARPS, 1], [2, 1, 0]
    )
    # How a block lies in registers as _read returns it, and the column of each logit in it.
    cube: gl.constexpr = (
        gl.full([1, HEIGHT, WIDTH], 0, gl.int32, registers)
        .reshape([HEIGHT, WIDTH // VECTOR, VECTOR])
        .type.layout
    )
    r = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(2, cube)))
    c = gl.arange(0, WIDTH // VECTOR, layout=gl.SliceLayout(0, gl.SliceLayout(2, cube)))
    v = gl.arange(0, VECTOR, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    column = r[:, None, None] * WIDTH + c[None, :, None] * VECTOR + v[None, None, :]
    slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 1, HEIGHT, WIDTH], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    step = gl.num_programs(0)
    chunks = (rows + HEIGHT - 1) // HEIGHT
    again = gl.maximum(chunks - SLOTS, 0)  # blocks of a row that are loaded twice
    uses = chunks + again
    wait_for_launches_in_front()
    let_next_start()
    for i in gl.static_range(SLOTS):
        _load(z, i, chunks, uses, step, slots, full, tokens)
    count = gl.load(count_ptr)
    # Where nothing is counted there are no gradients, not NaN.
    scale = gl.where(count == 0, 0.0, 1.0 / count)
    base = 0
    for row in range(gl.program_id(0), tokens, step):
        label = gl.load(labels_ptr + row)
        valid = label != ignore_index
        at = label - first
        inside = (at >= 0) & (at < rows * WIDTH)
        # Before anything of this row is overwritten.
        position = row.to(gl.int64) * rows * WIDTH + at  # type: ignore[attr-defined]
        target = gl.load(z_ptr + position, inside, other=float("nan")).to(gl.float32)
        at = at.to(gl.int32)

        # The sum: each thread its own maximum, of which the first is below all numbers.
        largest = gl.full([HEIGHT, WIDTH // VECTOR], -3.0e38, gl.float32, gl.SliceLayout(2, cube))
        total = gl.full([HEIGHT, WIDTH // VECTOR], 0.0, gl.float32, gl.SliceLayout(2, cube))
        for j in range(0, chunks):
            x = _read(slots, full, base + j, registers)
            x = gl.where((j * HEIGHT + r < rows)[:, None, None], x, float("-inf"))
            larger = gl.maximum(largest, gl.max(x, axis=2))
            total = total * gl.exp(largest - larger)
            total += gl.sum(gl.exp(x - larger[:, :, None]), axis=2)
            largest = larger
            if j < again:
                thread_barrier()
                _load(z, base + j + SLOTS, chunks, uses, step, slots, full, tokens)
        most = gl.max(gl.max(largest, axis=1), axis=0)
        if CONTINUED:
            before = gl.load(lse_ptr + row)
            most = gl.maximum(most, before)
        sum = gl.sum(gl.sum(total * gl.exp(largest - most), axis=1), axis=0)
        if CONTINUED:
            sum += gl.exp(before - most)
        lse = gl.where(valid, most + gl.log(sum), 0.0)
        # All have read what was there.
        thread_barrier()
        gl.store(lse_ptr + row, lse)
        if CONTINUED:
            gl.store(target_ptr + row, target, inside & valid)
        else:
            # NaN, and so it stays, if no slice holds the label.
            gl.store(target_ptr + row, gl.where(valid, target, 0.0))

        # The gradient.
        for k in range(again, uses):
            g = base + k
            block = gl.where(k < chunks, k, k - chunks)
            x = _read(slots, full, g, registers)
            hit = column == at - block * HEIGHT * WIDTH
            dz = (gl.exp(x - lse) - gl.where(hit, 1.0, 0.0)) * scale
            dz = gl.where(valid, dz, 0.0).to(gl.bfloat16)
            slot = slots.index(g % SLOTS)
            slot.store(gl.convert_layout(dz.reshape([1, HEIGHT, WIDTH]), registers))
            fence_async_shared()
            thread_barrier()
            tma_store(z, [row, block * HEIGHT, 0], slot)
            # The store before this one has read its slot.
            tma.store_wait(pendings=1)
            if k > again:
                _load(z, g - 1 + SLOTS, chunks, uses, step, slots, full, tokens)
        tma.store_wait(pendings=0)
        _load(z, base + uses - 1 + SLOTS, chunks, uses, step, slots, full, tokens)
        base += uses


def cross_entropy_hopper(
    z: Tensor,
    labels: Tensor,
    lse: Tensor,
    target: Tensor,
    count: Tensor,
    first: int,
    ignore_index: int,
) -> None:
    """Write over the logits ``z`` [T, V] their gradient; ``lse`` and ``target`` fp32 [T].

    With ``first`` above 0 the columns are those behind others, whose sums ``lse`` and ``target``
    hold. A row whose label is ``ignore_index`` has 0 everywhere.

    Args:
        z: bf16, contiguous, from an address that 16 divides; V is a multiple of 128.
        labels: int64 [T].
        count: fp32 [].
    """
    tokens, columns = z.shape
    if not tokens:
        return
    sms = torch.cuda.get_device_properties(z.device).multi_processor_count
    rows = columns // WIDTH.value
    described = TensorDescriptor.from_tensor(z.view(tokens, rows, WIDTH.value), BLOCK, LAYOUT.value)
    with torch.cuda.device(z.device):
        _cross_entropy_hopper_kernel[(min(sms, tokens),)](
            described,
            z,
            labels,
            lse,
            target,
            count,
            tokens,
            first,
            rows,
            ignore_index,
            CONTINUED=first > 0,
            WARPS=WARPS,
            num_warps=WARPS,
            launch_pdl=True,
        )

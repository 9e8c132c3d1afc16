"""Both halves of a gated MLP's activation in its products, for Hopper and few tokens.

    [gate, up] = x W^T,  act = silu(gate) * up         x [T, K], W [2F, K], act [T, F]
    dact = dy W;  dgate, dup and act from dact, gate, up   dy [T, N], W [N, F]

One kernel each, as kernels/linear_hopper.py builds them; formulas are those of kernels/swiglu.py.
Forward, a tile is 128 columns of the gate and the same of up, 256 rows of W. Backward, gate and up
of a tile are loaded while it is summed. bf16 in and out, fp32 between; forward, the activation is
that of the rounded gate and up, as a kernel of its own would compute it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.hopper_ring import (
    halves,
    thread_barrier,
    tma_load,
    tma_store,
    view,
    wait_for_launches_in_front,
    widen,
)
from forge.kernels.linear_auto import TOKENS
from forge.kernels.linear_hopper import (
    CLUSTERS,
    aligned_rows,
    check_operands,
    layout_of,
    let_next_start,
    load_first_rows,
    load_first_weights,
    multiply_ring,
    ring,
)

TOKENS_OF_A_PROGRAM = gl.constexpr(TOKENS)
CHUNK = gl.constexpr(64)  # columns whose activation is computed at a time
COLUMNS = 128  # of the activation in a tile
SLOTS = 4
# Of the tensors of both kernels as the tensor memory engine copies them.
FORWARD_BLOCKS = [[TOKENS, 64], [COLUMNS, 64], [TOKENS, 64], [TOKENS, 64]]
BACKWARD_BLOCKS = [[TOKENS, 64], [64, COLUMNS], [TOKENS, 64], [TOKENS, 64], [TOKENS, 64]]


@gluon.jit
def _sigmoid(x):
    # exp(-x) may be infinite: its reciprocal is 0 then. Two units in the last place, before bf16.
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def store_gate_up(acc, gate_up, act, row, column, F, X, W, chunk: gl.constexpr):
    """Gate and up, side by side in ``acc`` [128, 256], and the activation; by way of the ring."""
    BM: gl.constexpr = X.shape[1]
    layout: gl.constexpr = act.layout
    gates, ups = halves(acc)
    gates = halves(gates)
    ups = halves(ups)
    for c in gl.static_range(2):
        gate = gl.convert_layout(gates[c], chunk, assert_trivial=True).to(gl.bfloat16)
        up = gl.convert_layout(ups[c], chunk, assert_trivial=True).to(gl.bfloat16)
        X.index(2 * c).store(gate)
        X.index(2 * c + 1).store(up)
        wide = widen(gate)
        product = view(W.index(c), gl.bfloat16, [BM, CHUNK], layout)
        product.store((wide * _sigmoid(wide) * widen(up)).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    for c in gl.static_range(2):
        at = column + c * CHUNK
        tma_store(gate_up, [row, at], X.index(2 * c))
        tma_store(gate_up, [row, F + at], X.index(2 * c + 1))
        tma_store(act, [row, at], view(W.index(c), gl.bfloat16, [BM, CHUNK], layout))
    tma.store_wait(pendings=0)


@gluon.jit
def load_gate_up(gate_up, row, column, F, G, ready):
    """Request gate and up of a tile: chunks of the gate, then of up."""
    bytes: gl.constexpr = 4 * TOKENS_OF_A_PROGRAM * CHUNK * 2
    mbarrier.expect(ready.index(0), bytes)
    for c in gl.static_range(2):
        at = column + c * CHUNK
        tma_load(gate_up, [row, at], ready.index(0), G.index(c))
        tma_load(gate_up, [row, F + at], ready.index(0), G.index(2 + c))


@gluon.jit
def store_down_dx(acc, grad, act, row, column, F, X, G, chunk: gl.constexpr):
    """From ``acc`` [128, 128], the gradient of the activation, and gate and up in ``G``."""
    dacts = halves(acc)
    for c in gl.static_range(2):
        dact = gl.convert_layout(dacts[c], chunk, assert_trivial=True)
        gate = widen(G.index(c).load(chunk))
        up = widen(G.index(2 + c).load(chunk))
        s = _sigmoid(gate)
        silu = gate * s
        G.index(c).store((dact * up * s * (1.0 + gate * (1.0 - s))).to(gl.bfloat16))
        G.index(2 + c).store((dact * silu).to(gl.bfloat16))
        X.index(c).store((silu * up).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    for c in gl.static_range(2):
        at = column + c * CHUNK
        tma_store(grad, [row, at], G.index(c))
        tma_store(grad, [row, F + at], G.index(2 + c))
        tma_store(act, [row, at], X.index(c))
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["steps"])
def _gate_up_kernel(
    x, w, gate_up, act, steps, F, SLOTS: gl.constexpr, PREFETCH: gl.constexpr
):  # fmt: skip
    """Grid: tiles of tokens, tiles of columns of the activation."""
    COLUMNS: gl.constexpr = w.block_shape[0]
    row = gl.program_id(0) * x.block_shape[0]
    column = gl.program_id(1) * COLUMNS
    X, W, full = ring(x, w, SLOTS, 2 * COLUMNS)
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_weights(w, column, F + column, 0, steps, X, W, full, False)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(x, row, 0, steps, X, full)
    acc = multiply_ring(x, w, row, column, F + column, 0, steps, X, W, full, False)

    chunk: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, CHUNK, 16]
    )
    store_gate_up(acc, gate_up, act, row, column, F, X, W, chunk)


@gluon.jit(do_not_specialize=["steps"])
def _down_dx_kernel(
    dy, w, gate_up, grad, act, steps, F, SLOTS: gl.constexpr, PREFETCH: gl.constexpr
):  # fmt: skip
    """Grid: tiles of tokens, tiles of columns of the activation. ``grad`` may be ``gate_up``."""
    COLUMNS: gl.constexpr = w.block_shape[1]
    row = gl.program_id(0) * dy.block_shape[0]
    column = gl.program_id(1) * COLUMNS
    X, W, full = ring(dy, w, SLOTS, w.block_shape[0])
    # Chunks of gate, of up; then of their gradients.
    G = gl.allocate_shared_memory(gl.bfloat16, [4, dy.block_shape[0], CHUNK], gate_up.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_weights(w, column, 0, 0, steps, X, W, full, True)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(dy, row, 0, steps, X, full)
    load_gate_up(gate_up, row, column, F, G, ready)
    acc = multiply_ring(dy, w, row, column, 0, 0, steps, X, W, full, True)

    chunk: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, CHUNK, 16]
    )
    mbarrier.wait(ready.index(0), 0)
    store_down_dx(acc, grad, act, row, column, F, X, G, chunk)


def gate_up_hopper(
    x: Tensor, weight: Tensor, *, prefetch: bool = False, cluster: bool = False
) -> tuple[Tensor, Tensor]:
    """``[gate, up] = x W^T`` and ``silu(gate) * up``.

    Args:
        x: [..., K], bf16.
        weight: [2F, K], bf16, the rows of the gate first; F a multiple of 128, K of 8.
        prefetch: as in :func:`forge.kernels.linear_hopper.linear_hopper`.
        cluster: two programs share W, where this version of Triton can.

    Returns:
        [..., 2F] and [..., F], bf16.

    Raises:
        ValueError: shape, dtype, device or layout are none of these.
    """
    check_operands(x, weight, False)
    width = weight.shape[0] // 2
    if width % COLUMNS or weight.shape[0] % 2:
        raise ValueError(f"weight: {tuple(weight.shape)} must have 2F rows, F a multiple of 128")
    rows = aligned_rows(x)
    gate_up = rows.new_empty(rows.shape[0], 2 * width)
    act = rows.new_empty(rows.shape[0], width)
    if rows.shape[0]:
        tensors = (rows, weight, gate_up, act)
        _launch(False, tensors, weight.shape[1], width, prefetch, cluster)
    return gate_up.view(*x.shape[:-1], 2 * width), act.view(*x.shape[:-1], width)


def down_dx_hopper(
    dy: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    grad: Tensor,
    *,
    prefetch: bool = False,
    cluster: bool = False,
) -> Tensor:
    """The gradient of ``[gate, up]`` from ``dy``, that of ``act W^T``; and ``act`` again.

    Args:
        dy: [..., N], bf16.
        weight: [N, F], bf16; F a multiple of 128, N of 8.
        gate_up: [..., 2F], bf16, contiguous, the gates first.
        grad: written to, as ``gate_up``, which it may be.
        prefetch: of the weight, as in :func:`forge.kernels.linear_hopper.linear_hopper`.
        cluster: two programs share W, where this version of Triton can.

    Returns:
        ``silu(gate) * up`` [..., F], bf16.

    Raises:
        ValueError: shape, dtype, device or layout are none of these.
    """
    check_operands(dy, weight, True)
    width = weight.shape[1]
    if width % COLUMNS:
        raise ValueError(f"weight: {tuple(weight.shape)} must have F columns, a multiple of 128")
    for name, t in (("gate_up", gate_up), ("grad", grad)):
        if t.shape != (*dy.shape[:-1], 2 * width) or t.dtype != dy.dtype or not t.is_contiguous():
            raise ValueError(
                f"{name}: {t.dtype} {tuple(t.shape)} with strides {t.stride()} must be {dy.dtype} "
                f"{(*dy.shape[:-1], 2 * width)}, contiguous"
            )
    rows = aligned_rows(dy)
    act = rows.new_empty(rows.shape[0], width)
    if rows.shape[0]:
        tensors = (rows, weight, gate_up.view(-1, 2 * width), grad.view(-1, 2 * width), act)
        _launch(True, tensors, weight.shape[0], width, prefetch, cluster)
    return act.view(*dy.shape[:-1], width)


def _launch(
    dx: bool, tensors: tuple[Tensor, ...], terms: int, width: int, prefetch: bool, cluster: bool
) -> None:
    with torch.cuda.device(tensors[0].device):
        if cluster and CLUSTERS:
            from forge.kernels.gated_hopper_cluster import launch_clusters

            launch_clusters(dx, tensors, terms, width, prefetch)
            return
        blocks = BACKWARD_BLOCKS if dx else FORWARD_BLOCKS
        described = [
            TensorDescriptor.from_tensor(t, block, layout_of(block))
            for t, block in zip(tensors, blocks, strict=True)
        ]
        grid = (triton.cdiv(tensors[0].shape[0], TOKENS), width // COLUMNS)
        kernel = _down_dx_kernel if dx else _gate_up_kernel
        kernel[grid](
            *described,
            triton.cdiv(terms, 64),
            width,
            SLOTS=SLOTS,
            PREFETCH=prefetch,
            num_warps=8,
            launch_pdl=True,
        )

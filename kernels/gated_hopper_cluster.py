"""The products of kernels/gated_hopper.py by pairs of programs that share W.

As kernels/linear_hopper_cluster.py builds them. Forward, one program of a pair loads the gate's
rows of W for both, the other one those of up.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.gated_hopper import (
    CHUNK,
    COLUMNS,
    SLOTS,
    load_gate_up,
    store_down_dx,
    store_gate_up,
)
from forge.kernels.hopper_ring import wait_for_launches_in_front
from forge.kernels.linear_auto import TOKENS
from forge.kernels.linear_hopper import let_next_start, load_first_rows
from forge.kernels.linear_hopper_cluster import (
    cluster_ring,
    divided,
    load_first_halves,
    multicast_by,
    multiply_cluster,
    rank_of,
    run_clusters,
)

FORWARD_BLOCKS = [[2 * TOKENS, 64], [COLUMNS, 64], [2 * TOKENS, 64], [2 * TOKENS, 64]]
BACKWARD_BLOCKS = [[2 * TOKENS, 64], [64, COLUMNS // 2], *[[2 * TOKENS, 64]] * 3]
# Chunks of gate and up, between the ring and its barriers.
G_BYTES = gl.constexpr(4 * TOKENS * CHUNK.value * 2)

_LOAD_GATE_UP = multicast_by("_gate_up_cluster_kernel")
_LOAD_DOWN = multicast_by("_down_dx_cluster_kernel")


@gluon.jit(do_not_specialize=["steps"])
def _gate_up_cluster_kernel(
    x, w, gate_up, act, steps, F, SLOTS: gl.constexpr, PREFETCH: gl.constexpr
):  # fmt: skip
    """Grid: of pairs, else as in kernels/gated_hopper.py."""
    COLUMNS: gl.constexpr = w.block_shape[0]
    row = gl.program_id(0) * x.block_shape[0]
    column = gl.program_id(1) * COLUMNS
    half = column + rank_of() * F
    X, W, full, empty = cluster_ring(x, w, SLOTS, 2 * COLUMNS, False)
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_halves(half, 0, steps, X, W, full, 0, False, _LOAD_GATE_UP)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(x, row, 0, steps, X, full)
    acc = multiply_cluster(x, row, half, 0, steps, X, W, full, empty, 0, False, _LOAD_GATE_UP)
    chunk: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, CHUNK, 16], cga_layout=[[1, 0]]
    )
    store_gate_up(acc, gate_up, act, row, column, F, X, W, chunk)


@gluon.jit(do_not_specialize=["steps"])
def _down_dx_cluster_kernel(
    dy, w, gate_up, grad, act, steps, F, SLOTS: gl.constexpr, PREFETCH: gl.constexpr
):  # fmt: skip
    """Grid: of pairs, else as in kernels/gated_hopper.py."""
    BM: gl.constexpr = dy.block_shape[0]
    COLUMNS: gl.constexpr = 2 * w.block_shape[1]
    row = gl.program_id(0) * BM
    column = gl.program_id(1) * COLUMNS
    half = column + rank_of() * (COLUMNS // 2)
    X, W, full, empty = cluster_ring(dy, w, SLOTS, COLUMNS, True)
    G = gl.allocate_shared_memory(gl.bfloat16, [4, BM, CHUNK], gate_up.layout)
    one_each: gl.constexpr = mbarrier.MBarrierLayout(cga_layout=[[0]])
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], one_each)
    mbarrier.init(ready.index(0), count=1)
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_halves(half, 0, steps, X, W, full, G_BYTES, True, _LOAD_DOWN)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(dy, row, 0, steps, X, full)
    load_gate_up(gate_up, row, column, F, G, ready)
    acc = multiply_cluster(dy, row, half, 0, steps, X, W, full, empty, G_BYTES, True, _LOAD_DOWN)
    chunk: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, CHUNK, 16], cga_layout=[[1, 0]]
    )
    mbarrier.wait(ready.index(0), 0)
    store_down_dx(acc, grad, act, row, column, F, X, G, chunk)


def layouts(dx: bool) -> list[gl.NVMMASharedLayout]:
    """Of a kernel's tensors: all of W in both programs, rows of the others divided."""
    return [divided(i != 1) for i in range(5 if dx else 4)]


def launch_clusters(
    dx: bool, tensors: tuple[Tensor, ...], terms: int, width: int, prefetch: bool
) -> None:
    """Launch the kernel on the current device.

    Raises:
        RuntimeError: as :func:`forge.kernels.linear_hopper_cluster.run_clusters`.
    """
    described = [
        TensorDescriptor.from_tensor(t, block, layout)
        for t, block, layout in zip(
            tensors, BACKWARD_BLOCKS if dx else FORWARD_BLOCKS, layouts(dx), strict=True
        )
    ]
    grid = (triton.cdiv(tensors[0].shape[0], 2 * TOKENS), width // COLUMNS)
    run_clusters(
        _down_dx_cluster_kernel if dx else _gate_up_cluster_kernel,
        grid,
        (*described, triton.cdiv(terms, 64), width),
        dict(SLOTS=SLOTS, PREFETCH=prefetch),
        COLUMNS if dx else 2 * COLUMNS,
        G_BYTES.value if dx else 0,
    )

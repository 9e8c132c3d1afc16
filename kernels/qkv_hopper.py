"""The packed projection of attention for Hopper, with norm and rotation of q and k in its kernel.

    qkv = x W^T,    and of its queries and keys what kernels/qk_norm_rope.py computes

A tile of the product is 128 tokens of one head of 128 elements: its rows are normalised and rotated
where they are, in registers, from what was rounded to bf16, as a kernel behind would read it.

Shapes: T tokens, H heads of queries, K of keys and of values; x [T, C], W [(H+2K)*128, C].
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forge.kernels.hopper_ring import (
    halves,
    thread_barrier,
    tma_store,
    view,
    wait_for_launches_in_front,
)
from forge.kernels.linear_auto import Rotation, Tile
from forge.kernels.linear_hopper import (
    aligned_rows,
    blocks,
    check_operands,
    layout_of,
    let_next_start,
    load_first_rows,
    load_first_weights,
    make_ring,
    multiply,
)
from forge.kernels.qk_norm_rope_backward import batched

HEAD = 128  # elements
TILE = Tile(HEAD, 5)


@gluon.jit
def _table(ptr, batch, token, batch_pitch, pitch, c, inside):
    """Both halves of the rows of cos or sin, fp32."""
    at = ptr + (batch * batch_pitch + token * pitch)[:, None] + c[None, :]
    a = gl.load(at, inside[:, None], other=0.0).to(gl.float32)
    b = gl.load(at + c.shape[0], inside[:, None], other=0.0).to(gl.float32)
    return a, b


@gluon.jit(do_not_specialize=["rows", "tokens", "steps", "q_columns", "rotated_columns"])
def _qkv_hopper_kernel(
    x, w, y, rotated, q_weight, k_weight, cos, sin, rows, tokens, cos_batch, cos_pitch, sin_batch,
    sin_pitch, steps, q_columns, rotated_columns, eps,
    SLOTS: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens, heads. ``rows`` of x are sequences of ``tokens``."""
    BM: gl.constexpr = y.block_shape[0]
    D: gl.constexpr = y.block_shape[1]
    row = gl.program_id(0) * BM
    column = gl.program_id(1) * D
    X, W, full = make_ring(x, w, SLOTS)
    if not PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_weights(w, column, 0, steps, X, W, full, False)
    if PREFETCH:
        wait_for_launches_in_front()
        let_next_start()
    load_first_rows(x, row, 0, steps, X, full)
    raw = multiply(x, w, row, column, 0, steps, X, W, full, False).to(gl.bfloat16)
    layout: gl.constexpr = y.layout
    out = view(X, gl.bfloat16, [BM, D], layout)
    out.store(raw)
    fence_async_shared()
    thread_barrier()
    tma_store(y, [row, column], out)
    if column < rotated_columns:
        a, b = halves(raw.to(gl.float32))
        half: gl.constexpr = a.type.layout
        r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, half))
        c = gl.arange(0, D // 2, layout=gl.SliceLayout(0, half))
        batch = r // tokens
        token = r - batch * tokens
        cos_a, cos_b = _table(cos, batch, token, cos_batch, cos_pitch, c, r < rows)
        sin_a, sin_b = _table(sin, batch, token, sin_batch, sin_pitch, c, r < rows)
        weight = q_weight
        if column >= q_columns:
            weight = k_weight
        weight_a = gl.load(weight + c).to(gl.float32)[None, :]
        weight_b = gl.load(weight + D // 2 + c).to(gl.float32)[None, :]
        rstd = gl.rsqrt((gl.sum(a * a, axis=1) + gl.sum(b * b, axis=1)) / D + eps)[:, None]
        p = a * rstd * weight_a
        q = b * rstd * weight_b
        # The ring's slots of W are as large as half a head.
        W.index(0).store((p * cos_a - q * sin_a).to(gl.bfloat16))
        W.index(1).store((q * cos_b + p * sin_b).to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        tma_store(rotated, [row, column], W.index(0))
        tma_store(rotated, [row, column + D // 2], W.index(1))
    tma.store_wait(pendings=0)


def qkv_hopper(
    x: Tensor, weight: Tensor, rotation: Rotation, *, prefetch: bool = False
) -> tuple[Tensor, Tensor]:
    """``x W^T``, and its queries and keys normalised and rotated, on a Hopper GPU.

    Args:
        x: [B, T, C], bf16, as in :func:`forge.kernels.linear_hopper.linear_hopper`.
        weight: [(H+2K)*128, C], bf16.
        rotation: norms of size 128, bf16 tables [1 or B, T, 128].
        prefetch: as in :func:`forge.kernels.linear_hopper.linear_hopper`.

    Returns:
        qkv [B, T, (H+2K)*128] and [B, T, (H+K)*128], bf16.

    Raises:
        ValueError: shape, dtype, device or layout are none of these.
    """
    check_operands(x, weight, dx=False)
    heads, left = divmod(weight.shape[0], HEAD)
    kv_heads = (heads - rotation.q_heads) // 2
    rotated_heads = rotation.q_heads + kv_heads
    if left or kv_heads < 1 or rotation.q_heads + 2 * kv_heads != heads:
        raise ValueError(
            f"weight: {tuple(weight.shape)} must have {HEAD} rows for each of {rotation.q_heads} "
            "heads of queries, and of as many of keys as of values"
        )
    batch, tokens = x.shape[:-1]
    for name in ("q_weight", "k_weight", "cos", "sin"):
        given = getattr(rotation, name)
        if given.dtype != torch.bfloat16 or given.shape[-1] != HEAD or given.stride(-1) != 1:
            raise ValueError(
                f"{name}: {given.dtype} {tuple(given.shape)} must be torch.bfloat16 [.., {HEAD}]"
            )
    cos, sin = batched(rotation.cos, batch), batched(rotation.sin, batch)
    qkv = torch.empty((batch, tokens, heads * HEAD), dtype=x.dtype, device=x.device)
    rotated = torch.empty((batch, tokens, rotated_heads * HEAD), dtype=x.dtype, device=x.device)
    rows = aligned_rows(x)
    if rows.shape[0]:
        boxes = blocks(TILE, dx=False)
        matrices = (
            rows,
            weight,
            qkv.view(-1, heads * HEAD),
            rotated.view(-1, rotated_heads * HEAD),
        )
        described = [
            TensorDescriptor.from_tensor(t, block, layout_of(block))
            for t, block in zip(matrices, (*boxes, [boxes[2][0], HEAD // 2]), strict=True)
        ]
        with torch.cuda.device(x.device):
            _qkv_hopper_kernel[(triton.cdiv(rows.shape[0], boxes[2][0]), heads)](
                *described,
                rotation.q_weight,
                rotation.k_weight,
                cos,
                sin,
                rows.shape[0],
                tokens,
                *cos.stride()[:2],
                *sin.stride()[:2],
                triton.cdiv(rows.shape[1], TILE.terms),
                rotation.q_heads * HEAD,
                rotated_heads * HEAD,
                rotation.eps,
                SLOTS=TILE.slots,
                PREFETCH=prefetch,
                num_warps=8,
                launch_pdl=True,
            )
    return qkv, rotated

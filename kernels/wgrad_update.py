"""Weight gradient of a linear layer and the optimizer update in one kernel.

    dW = dY^T X                                      fp32 accumulation, never stored
    w, states = rule(w, dW, states, scalars)

Shapes: dY [M, N], X [M, K]; w and every state [N, K]. M tokens, N output and K input features.
Each program forms one tile of dW in registers and updates the same tile of w and of the states
(FORGE, arXiv 2606.22932, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.kernels.apply_rule import apply_rule_reference, update_elements
from forge.kernels.runtime import INTERPRETED, Dual, on_device, runs_triton, tl, triton
from forge.kernels.table import (
    CAPACITY,
    alignment,
    chunks,
    field,
    find_entry,
    offset,
    pointer,
    pointer_table,
)


def wgrad_update_reference(
    dy: Tensor,
    x: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    scalars: Tensor,
    seed: Tensor | None,
    salt: int,
    rule: Dual,
) -> None:
    """One weight in plain torch: the gradient exists here, as an fp32 temporary."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    grad = dy.float().t() @ x.float()
    apply_rule_reference(param, grad, states, scalars, seed, salt, rule)


@triton.jit
def _wgrad_update_kernel(
    table_ptr,  # fields: M, salt, N, K, pitches of dy and x, offsets from the next arguments
    dy_ptr,
    x_ptr,
    w_ptr,
    state_ptrs,
    scalars_ptr,
    seed_ptr,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    entry, tile = find_entry(table_ptr, CAPACITY)
    M = field(table_ptr, entry, 1, 1, CAPACITY).to(tl.int32)
    salt = field(table_ptr, entry, 2, 1, CAPACITY)
    # int64: N * K may pass 2^31.
    N = field(table_ptr, entry, 3, ALIGN, CAPACITY)
    K = field(table_ptr, entry, 4, ALIGN, CAPACITY)
    dy_stride = field(table_ptr, entry, 5, ALIGN, CAPACITY)
    x_stride = field(table_ptr, entry, 6, ALIGN, CAPACITY)
    dy_ptr = pointer(dy_ptr, table_ptr, entry, 7, ALIGN, CAPACITY)
    x_ptr = pointer(x_ptr, table_ptr, entry, 8, ALIGN, CAPACITY)
    w_ptr = pointer(w_ptr, table_ptr, entry, 9, ALIGN, CAPACITY)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        states = states + (pointer(state_ptrs[j], table_ptr, entry, 10 + j, ALIGN, CAPACITY),)

    # Walk the tiles in strips of GROUP rows, so that programs running together share operands in L2.
    tiles_n = tl.cdiv(N, BLOCK_N).to(tl.int32)
    tiles_k = tl.cdiv(K, BLOCK_K).to(tl.int32)
    strip = tile // (GROUP * tiles_k)
    rows = min(tiles_n - strip * GROUP, GROUP)
    tile_n = strip * GROUP + (tile % (GROUP * tiles_k)) % rows
    tile_k = (tile % (GROUP * tiles_k)) // rows

    rm = tl.arange(0, BLOCK_M)
    rn = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    in_n = rn < N.to(tl.int32)
    in_k = rk < K.to(tl.int32)
    dy_ptrs = dy_ptr + rm[:, None] * dy_stride + rn[None, :]  # [BM, BN]
    x_ptrs = x_ptr + rm[:, None] * x_stride + rk[None, :]  # [BM, BK]
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for m in range(0, M, BLOCK_M):
        in_m = rm < M - m
        dy = tl.load(dy_ptrs, mask=in_m[:, None] & in_n[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=in_m[:, None] & in_k[None, :], other=0.0)
        if UPCAST:
            dy = dy.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
        dy_ptrs += BLOCK_M * dy_stride
        x_ptrs += BLOCK_M * x_stride

    index = rn[:, None] * K + rk[None, :]
    mask = in_n[:, None] & in_k[None, :]
    update_elements(
        w_ptr, states, scalars_ptr, seed_ptr, salt, acc, index, mask, RULE, SCALARS, STOCHASTIC
    )


def _tile(operand_bytes: int) -> dict[str, int]:
    """Tile sizes and warps. Measured on an H200 for the 196 linears of Qwen3-0.6B at 512 tokens:
    64x64 4.0 ms, 64x128 4.4 to 4.7, 128x128 5.4; larger tiles run out of registers in the update."""
    if operand_bytes == 4:
        return dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, GROUP=8, num_warps=4, num_stages=3)
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP=8, num_warps=4, num_stages=4)


def _rows(t: Tensor) -> Tensor:
    """``t`` as rows whose elements lie side by side; the pitch of the rows is free."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def wgrad_update(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    params: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    salts: Sequence[int],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
    *,
    tile: dict[str, int] | None = None,
) -> None:
    """Update every weight and its states in place from ``dW = dy^T x``, in one launch.

    Args:
        dys: for each weight [..., N], the gradient of the layer's output: bf16, fp16 or fp32, any
            strides, leading dimensions M tokens in all; M may be 0 (a zero gradient).
        xs: for each weight [..., K], the layer's input, of the dtype of ``dys``.
        params: [N, K] each, contiguous, bf16 or fp32; one dtype and device for all.
        states: for each weight its states, [N, K] contiguous, bf16 or fp32, one dtype for all.
        salts, scalars, seed, rule: as in :func:`forge.kernels.apply_rule.apply_rule`.
        tile: overrides the tile sizes (``BLOCK_M, BLOCK_N, BLOCK_K, GROUP, num_warps, num_stages``).
    """
    if not runs_triton(params[0]):
        for dy, x, param, state, salt in zip(dys, xs, params, states, salts, strict=True):
            wgrad_update_reference(dy, x, param, state, scalars, seed, salt, rule)
        return
    dys, xs = [_rows(t) for t in dys], [_rows(t) for t in xs]
    tile = tile or _tile(dys[0].element_size())
    block_n, block_k = tile["BLOCK_N"], tile["BLOCK_K"]
    base = [dys[0], xs[0], params[0], *states[0]]
    rows = [
        (
            triton.cdiv(p.shape[0], block_n) * triton.cdiv(p.shape[1], block_k),
            dy.shape[0],
            salt,
            p.shape[0],
            p.shape[1],
            dy.stride(0),
            x.stride(0),
            *map(offset, (dy, x, p, *state), base),
        )
        for dy, x, p, state, salt in zip(dys, xs, params, states, salts, strict=True)
        if p.numel() > 0
    ]
    for chunk in chunks(rows):
        table, programs = pointer_table(chunk, params[0].device)
        with on_device(params[0]):
            _wgrad_update_kernel[(programs,)](
                table,
                *base[:3],
                tuple(base[3:]),
                scalars,
                seed if seed is not None else scalars,
                RULE=rule.triton,
                SCALARS=scalars.numel(),
                STOCHASTIC=seed is not None,
                PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
                # The interpreter's dot is wrong on bf16 operands.
                UPCAST=INTERPRETED,
                ALIGN=alignment(chunk, fields=slice(3, None)),
                CAPACITY=CAPACITY,
                **tile,
            )

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
from forge.kernels.runtime import INTERPRETED, Dual, as_rows, on_device, runs_triton, tl, triton
from forge.kernels.target import BLOCK, CAPACITY, Table, Target, field, find_entry, pointer


def wgrad_update_reference(
    dy: Tensor, x: Tensor, target: Target, scalars: Tensor, seed: Tensor | None, rule: Dual
) -> None:
    """One weight in plain torch: the gradient exists here, as an fp32 temporary."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    apply_rule_reference(dy.float().t() @ x.float(), target, scalars, seed, rule)


@triton.jit
def _wgrad_update_kernel(
    table_ptr,  # entries: M, pitch of dy, pitch of x, address of dy, of x, then Target.fields
    dy_ptr,  # of this and the next arguments only the types count
    x_ptr,
    w_ptr,
    state_ptrs,
    scale_ptrs,
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
    entry_ptr = table_ptr + CAPACITY + entry * (10 + len(state_ptrs) + len(scale_ptrs))
    M = field(entry_ptr, 0, 1).to(tl.int32)
    dy_stride = field(entry_ptr, 1, ALIGN)
    x_stride = field(entry_ptr, 2, ALIGN)
    dy_ptr = pointer(dy_ptr, entry_ptr, 3, ALIGN)
    x_ptr = pointer(x_ptr, entry_ptr, 4, ALIGN)
    salt = field(entry_ptr, 5, 1)
    # int64: N * K may pass 2^31.
    N = field(entry_ptr, 7, ALIGN)
    K = field(entry_ptr, 8, ALIGN)
    w_ptr = pointer(w_ptr, entry_ptr, 9, ALIGN)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        states = states + (pointer(state_ptrs[j], entry_ptr, 10 + j, ALIGN),)
    scales = ()
    for j in tl.static_range(len(scale_ptrs)):
        scales = scales + (pointer(scale_ptrs[j], entry_ptr, 10 + len(state_ptrs) + j, 1),)

    # Walk the tiles in strips of GROUP rows: programs running together share operands in L2.
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
    blocks = rn[:, None].to(tl.int64) * tiles_k + tile_k  # of scales: BLOCK_K is one block then
    update_elements(
        w_ptr, states, scales, scalars_ptr, seed_ptr, salt, acc, index, mask, blocks,
        in_n[:, None], RULE, SCALARS, STOCHASTIC,
    )  # fmt: skip


def _tile(operand_bytes: int, coded: bool = False) -> dict[str, int]:
    """Tile sizes and warps.

    Measured on an H200, the 196 linears of Qwen3-0.6B, ms at 512 / 4096 tokens: 64x128 with 8 warps
    4.1 / 11.2, 64x64 with 4 warps 4.9 / 12.5, 128x64 4.5 / 14.0. Larger tiles spill in the update.
    """
    if operand_bytes == 4 and coded:
        return dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=128, GROUP=8, num_warps=8, num_stages=3)
    if operand_bytes == 4:
        return dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, GROUP=8, num_warps=4, num_stages=3)
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, GROUP=8, num_warps=8, num_stages=4)


def wgrad_update(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
    *,
    tile: dict[str, int] | None = None,
) -> None:
    """Update every weight and its states in place from ``dW = dy^T x``, many in one launch.

    Args:
        dys: for each weight [..., N], the gradient of the layer's output: bf16, fp16 or fp32, any
            strides; the leading dimensions are M tokens in all. M may be 0: a zero gradient.
        xs: for each weight [..., K], the layer's input, of the dtype of ``dys``.
        targets: weights [N, K], contiguous; of one device, and one dtype for all weights and for
            all states.
        scalars, seed, rule: as in :func:`forge.kernels.apply_rule.apply_rule`.
        tile: overrides the tile: ``BLOCK_M, BLOCK_N, BLOCK_K, GROUP, num_warps, num_stages``.
    """
    first = targets[0]
    if not runs_triton(first.param):
        for dy, x, target in zip(dys, xs, targets, strict=True):
            if target.param.numel():
                wgrad_update_reference(dy, x, target, scalars, seed, rule)
        return
    tile = tile or _tile(dys[0].element_size(), coded=bool(first.scales))
    if first.scales and tile["BLOCK_K"] != BLOCK:
        raise ValueError(f"tile: 8-bit states need BLOCK_K={BLOCK}, the block that shares a scale")
    block_n, block_k = tile["BLOCK_N"], tile["BLOCK_K"]
    for start in range(0, len(targets), CAPACITY):
        chunk = slice(start, start + CAPACITY)
        table = Table()
        kept: list[Tensor] = []  # copies of strided operands live until the launch
        for dy, x, target in zip(dys[chunk], xs[chunk], targets[chunk], strict=True):
            if not target.fields[1]:
                continue
            n, k = target.fields[2:4]
            if dy.is_contiguous() and x.is_contiguous():
                tokens, dy_pitch, x_pitch = dy.numel() // n, n, k
            else:
                dy, x = as_rows(dy), as_rows(x)
                tokens, dy_pitch, x_pitch = dy.shape[0], dy.stride(0), x.stride(0)
                kept += (dy, x)
            dy_address, x_address = dy.data_ptr(), x.data_ptr()
            table.add(
                -(-n // block_n) * -(-k // block_k),
                (tokens, dy_pitch, x_pitch, dy_address, x_address, *target.fields),
                dy_pitch | x_pitch | dy_address | x_address | target.matrix_bits,
            )
        if not table.programs:
            continue
        with on_device(first.param):
            _wgrad_update_kernel[(table.programs,)](
                table.to(first.param.device),
                dys[0],
                xs[0],
                first.param,
                first.states,
                first.scales,
                scalars,
                seed if seed is not None else scalars,
                RULE=rule.triton,
                SCALARS=scalars.numel(),
                STOCHASTIC=seed is not None,
                PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
                # The interpreter's dot is wrong on bf16 operands.
                UPCAST=INTERPRETED,
                ALIGN=table.alignment,
                CAPACITY=CAPACITY,
                **tile,
            )

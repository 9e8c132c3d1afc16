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
    """The same in plain torch: the gradient exists here, as an fp32 temporary."""
    grad = dy.float().t() @ x.float()
    apply_rule_reference(param, grad, states, scalars, seed, salt, rule)


@triton.jit(do_not_specialize=["M", "salt"])
def _wgrad_update_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    state_ptrs,
    scalars_ptr,
    seed_ptr,
    salt,
    M,
    N,
    K,
    dy_stride,
    x_stride,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Walk the tiles in strips of GROUP rows, so that programs running together share operands in L2.
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    strip = pid // (GROUP * tiles_k)
    rows = min(tiles_n - strip * GROUP, GROUP)
    tile_n = strip * GROUP + (pid % (GROUP * tiles_k)) % rows
    tile_k = (pid % (GROUP * tiles_k)) // rows

    rm = tl.arange(0, BLOCK_M)
    rn = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    in_n = rn < N
    in_k = rk < K
    dy_ptrs = dy_ptr + rm[:, None].to(tl.int64) * dy_stride + rn[None, :]  # [BM, BN]
    x_ptrs = x_ptr + rm[:, None].to(tl.int64) * x_stride + rk[None, :]  # [BM, BK]
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for m in range(0, M, BLOCK_M):
        in_m = rm < M - m
        dy = tl.load(dy_ptrs, mask=in_m[:, None] & in_n[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=in_m[:, None] & in_k[None, :], other=0.0)
        if UPCAST:
            dy = dy.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
        dy_ptrs += BLOCK_M * dy_stride.to(tl.int64)
        x_ptrs += BLOCK_M * x_stride.to(tl.int64)

    # int64 before the product: a matrix may hold more than 2^31 elements.
    index = rn[:, None].to(tl.int64) * K + rk[None, :]
    mask = in_n[:, None] & in_k[None, :]
    update_elements(
        w_ptr, state_ptrs, scalars_ptr, seed_ptr, salt, acc, index, mask, RULE, SCALARS, STOCHASTIC
    )


def _tile(tokens: int, operand_bytes: int) -> dict[str, int]:
    """Tile sizes and warps. Small tiles keep the accumulator and the three stored tiles in registers."""
    if operand_bytes == 4:
        return dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, GROUP=8, num_warps=4, num_stages=3)
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP=8, num_warps=4, num_stages=4)


def _rows(t: Tensor) -> Tensor:
    """``t`` with unit inner stride: the kernel walks rows of any pitch, elements side by side."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def wgrad_update(
    dy: Tensor,
    x: Tensor,
    param: Tensor,
    states: Sequence[Tensor],
    scalars: Tensor,
    seed: Tensor | None,
    salt: int,
    rule: Dual,
    *,
    tile: dict[str, int] | None = None,
) -> None:
    """Update ``param`` [N, K] and ``states`` in place from ``dW = dy^T x``.

    Args:
        dy: [M, N], gradient of the layer's output; bf16, fp16 or fp32, any strides. M may be 0.
        x: [M, K], the layer's input, same dtype as ``dy``.
        param: [N, K] contiguous, bf16 or fp32.
        states: [N, K] contiguous each, bf16 or fp32.
        scalars, seed, salt, rule: as in :func:`forge.kernels.apply_rule.apply_rule`.
        tile: overrides the tile sizes (``BLOCK_M, BLOCK_N, BLOCK_K, GROUP, num_warps, num_stages``).
    """
    if not runs_triton(param):
        wgrad_update_reference(dy, x, param, states, scalars, seed, salt, rule)
        return
    if param.numel() == 0:
        return
    dy, x = _rows(dy), _rows(x)
    tokens, n, k = dy.shape[0], dy.shape[1], x.shape[1]
    tile = tile or _tile(tokens, dy.element_size())
    tf32 = torch.backends.cuda.matmul.allow_tf32
    grid = (triton.cdiv(n, tile["BLOCK_N"]) * triton.cdiv(k, tile["BLOCK_K"]),)
    with on_device(param):
        _wgrad_update_kernel[grid](
            dy,
            x,
            param,
            tuple(states),
            scalars,
            seed if seed is not None else scalars,
            salt,
            tokens,
            n,
            k,
            dy.stride(0),
            x.stride(0),
            RULE=rule.triton,
            SCALARS=scalars.numel(),
            STOCHASTIC=seed is not None,
            PRECISION="tf32" if tf32 else "ieee",
            # The interpreter's dot is wrong on bf16 operands.
            UPCAST=INTERPRETED,
            **tile,
        )

"""SwiGLU: the gated activation between the two halves of an MLP.

    y = silu(gate) * up,      silu(a) = a * s(a),  s(a) = 1 / (1 + exp(-a))

and backward

    dgate = dy * up * s * (1 + gate * (1 - s)),      dup = dy * gate * s

Shapes: gate, up, y [..., F], or gate and up side by side in one tensor [..., 2F] (Shazeer, arXiv
2002.05202). fp32 inside; backward computes s again instead of keeping it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.runtime import (
    as_rows,
    begin,
    early_launch,
    on_device,
    power_of_2,
    processors,
    runs_triton,
    tl,
    triton,
)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """In plain torch; differentiable."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    if dtype == torch.float64:
        return F.silu(gate) * up
    return (F.silu(gate.float()) * up.float()).to(dtype)


@triton.jit
def _swiglu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_pitch,
    up_pitch,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < F
    gate = tl.load(gate_ptr + row * gate_pitch + f, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_pitch + f, mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * F + f, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,  # may be gate and up themselves
    dup_ptr,
    y_ptr,  # None, or where y is written once more
    dy_pitch,
    gate_pitch,
    up_pitch,
    dgate_pitch,
    dup_pitch,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,  # blocks of a program
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCK * COUNT) + tl.arange(0, BLOCK)
    loaded = ()
    # All loads first: behind a store each would wait for the one in front of it.
    for i in tl.static_range(COUNT):
        f = first + i * BLOCK
        dy = tl.load(dy_ptr + row * dy_pitch + f, f < F, other=0.0)
        gate = tl.load(gate_ptr + row * gate_pitch + f, f < F, other=0.0)
        up = tl.load(up_ptr + row * up_pitch + f, f < F, other=0.0)
        loaded = loaded + ((dy, gate, up),)
    for i in tl.static_range(COUNT):
        f = first + i * BLOCK
        dy = loaded[i][0].to(tl.float32)
        gate = loaded[i][1].to(tl.float32)
        up = loaded[i][2].to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        dgate = dy * up * s * (1 + gate * (1 - s))
        dgate_ptrs, dup_ptrs = dgate_ptr + row * dgate_pitch + f, dup_ptr + row * dup_pitch + f
        tl.store(dgate_ptrs, dgate.to(dgate_ptr.dtype.element_ty), f < F)
        tl.store(dup_ptrs, (dy * silu).to(dup_ptr.dtype.element_ty), f < F)
        if y_ptr is not None:
            tl.store(y_ptr + row * F + f, (silu * up).to(y_ptr.dtype.element_ty), f < F)


def _grid(rows: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """8 elements a thread, one 16-byte access in bf16."""
    columns = rows.shape[1]
    block = min(1024, power_of_2(columns))
    return (rows.shape[0], -(-columns // block)), dict(BLOCK=block, num_warps=4)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` by the kernel."""
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    gates, ups = as_rows(gate), as_rows(up)
    grid, tile = _grid(gates)
    if y.numel():
        with on_device(y):
            _swiglu_fwd_kernel[grid](
                gates,
                ups,
                y,
                gates.stride(0),
                ups.stride(0),
                F=gates.shape[1],
                **tile,
                **early_launch(y),
            )
    return y


def _blocks_of_a_program(tokens: int, blocks: int, multiprocessors: int) -> int:
    """In backward, where there are programs enough: up to four blocks of a token.

    Addresses and the start of a program then cost a few of its instructions, not a fifth, and it
    computes one block while it waits for the next.
    """
    if tokens < 2 * multiprocessors:
        return 1
    return next(count for count in (4, 3, 2, 1) if blocks % count == 0)


def swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, y: Tensor | None = None
) -> None:
    """Write the gradients of ``gate`` and ``up``, by the kernel.

    Args:
        dgate, dup: [M, F] rows to write, of any pitch; may be the rows of ``gate`` and ``up``.
        y: contiguous [..., F]: the forward pass's result is written to it, too.
    """
    dys, gates, ups = as_rows(dy), as_rows(gate), as_rows(up)
    (tokens, blocks), tile = _grid(gates)
    count = _blocks_of_a_program(tokens, blocks, processors(gates))
    if dy.numel():
        with on_device(dy):
            _swiglu_bwd_kernel[(tokens, blocks // count)](
                dys,
                gates,
                ups,
                dgate,
                dup,
                y,
                dys.stride(0),
                gates.stride(0),
                ups.stride(0),
                dgate.stride(0),
                dup.stride(0),
                F=gates.shape[1],
                COUNT=count,
                **tile,
                **early_launch(dy),
            )


class SwiGLUFunction(torch.autograd.Function):
    """``silu(gate) * up``."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        dgate, dup = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        swiglu_backward(dy, gate, up, as_rows(dgate), as_rows(dup))
        return dgate, dup


class PackedSwiGLUFunction(torch.autograd.Function):
    """``silu(gate) * up`` of ``[gate, up]``, whose gradient is one tensor again."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, overwrite: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.overwrite = overwrite
        return swiglu_forward(*gate_up.chunk(2, dim=-1))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (gate_up,) = ctx.saved_tensors
        gate_up = gate_up.detach()
        grad = gate_up
        # A kept graph will read it again.
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if kept or not ctx.overwrite or not gate_up.is_contiguous():
            grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        swiglu_backward(dy, *gate_up.chunk(2, dim=-1), *as_rows(grad).chunk(2, dim=-1))
        return grad, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate, up: [..., F], any float dtype and strides.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"up: {tuple(up.shape)} must have gate's shape {tuple(gate.shape)}")
    if not runs_triton(gate):
        return swiglu_reference(gate, up)
    return SwiGLUFunction.apply(gate, up)


def packed_swiglu(gate_up: Tensor, overwrite: bool = False) -> Tensor:
    """``silu(gate) * up`` [..., F] of ``gate_up`` [..., 2F], the gates first.

    Args:
        gate_up: any float dtype and strides.
        overwrite: backward may write the gradient over ``gate_up``, which nobody else reads then.
            It does so on a GPU, unless the graph is kept.

    Raises:
        ValueError: the last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: the last dimension of {tuple(gate_up.shape)} must be even")
    if not runs_triton(gate_up):
        return swiglu_reference(*gate_up.chunk(2, dim=-1))
    return PackedSwiGLUFunction.apply(gate_up, overwrite)

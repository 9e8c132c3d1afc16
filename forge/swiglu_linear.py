"""The second half of a gated MLP, whose activation is not kept for the backward pass.

    y = act W^T,     act = silu(gate) * up

The gradient of W needs ``act`` [..., F] again. The kernel that computes the gradients of gate and
up has all it takes to write it once more, so only ``[gate, up]`` is kept: a third less memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge.kernels.linear_auto import linear_backward, linear_forward
from forge.kernels.runtime import as_rows, runs_triton
from forge.kernels.swiglu import packed_swiglu, swiglu_backward, swiglu_forward
from forge.linear import ForgeLinear, Slot, active_slot, refuse_create_graph, saved
from forge.packed_linear import is_plain, plain_weight


class SwiGLULinearFunction(torch.autograd.Function):
    """Backward as :class:`forge.linear.LinearFunction`; writes over ``gate_up`` its gradient."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, weight: Tensor, slot: Slot, unsummed: bool) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.slot = slot
        act = swiglu_forward(*gate_up.chunk(2, dim=-1))
        # Between two norms: the first one's kernel lies between this one and any update.
        return linear_forward(act, weight, prefetch=unsummed, unsummed=unsummed)

    @staticmethod
    def backward(ctx, dy: Tensor):
        if torch.is_grad_enabled():
            refuse_create_graph(ctx.slot.name)
        gate_up, weight = saved(ctx, ctx.slot)
        gate_up = grad = gate_up.detach()
        need_gate_up, need_weight, *_ = ctx.needs_input_grad
        # A kept graph will read it again.
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if kept or not need_gate_up or not gate_up.is_contiguous():
            grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        dact = linear_backward(dy, weight, prefetch=True)
        act = torch.empty_like(dact) if need_weight else None
        gate, up = gate_up.chunk(2, dim=-1)
        dgate, dup = as_rows(grad).chunk(2, dim=-1)
        swiglu_backward(dact, gate, up, dgate, dup, act)
        dw = None
        if act is not None and not ctx.slot.collect(act, dy):
            dw = as_rows(dy).t() @ as_rows(act)
        return grad if need_gate_up else None, dw, None, None


def swiglu_linear(gate_up: Tensor, layer: nn.Module, unsummed: bool = False) -> Tensor:
    """``layer(silu(gate) * up)``; backward may overwrite ``gate_up``, which nobody else may read.

    Args:
        gate_up: [..., 2F], the gates first.
        layer: a linear layer of F input features.
        unsummed: as in :func:`forge.kernels.linear_auto.linear_forward`.
    """
    weight = plain_weight(layer) if is_plain(layer, ForgeLinear) else None
    slot = active_slot(weight, gate_up)
    if (
        slot is None
        or weight is None
        or not runs_triton(gate_up)
        or weight.dtype != gate_up.dtype
        or torch._C._is_any_autocast_enabled()
        or torch.compiler.is_compiling()
    ):
        return layer(packed_swiglu(gate_up, overwrite=True))
    return SwiGLULinearFunction.apply(gate_up, weight, slot, unsummed)

"""The norm of all gradients together, before ``step()`` applies any: ``update="step"`` alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from forge.queue import check_single_process

if TYPE_CHECKING:
    from forge.optimizer import ForgeOptimizer


def clip(optimizer: ForgeOptimizer) -> bool:
    """Clip the gradients of this step; False when they are to be skipped."""
    check_single_process()
    params = [slot.param for slot in optimizer._slots if slot.param.grad is not None]
    if optimizer.max_grad_norm is not None:
        optimizer.grad_norm = torch.nn.utils.clip_grad_norm_(params, optimizer.max_grad_norm)
    if optimizer.on_nonfinite == "propagate":
        return True
    if optimizer.max_grad_norm is None:
        grads = [param.grad for param in params if param.grad is not None]
        optimizer.grad_norm = torch.nn.utils.get_total_norm(grads)
    assert optimizer.grad_norm is not None
    norm = float(optimizer.grad_norm)
    if optimizer.on_nonfinite == "raise" and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {norm}; nothing was updated. zero_grad() discards "
            "them; on_nonfinite='skip' does so by itself"
        )
    if norm == 0 and any(group["lr"] != 0 for group in optimizer.param_groups):
        # Not the squares' underflow. With lr 0 (how torch.distributed.checkpoint has states
        # made) nothing moves anyway.
        return any(bool(p.grad.any()) for p in params if p.grad is not None)
    return math.isfinite(norm)

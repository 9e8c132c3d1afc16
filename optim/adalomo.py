"""AdaLomo: factored second moment, no momentum, updates applied in backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from forge.optim.footprint import RELEASED, Footprint, factored
from forge.optim.spec import Hyper, OptimizerSpec

# AdaLomo multiplies its rate by RMS(weight): 0.02 for the matrices of these models, 1 for norms.
# 50 times AdamW's rate moves a matrix as far as AdamW does; at AdamW's 1e-5 it is the 5e-4 of its
# authors. The same product multiplies the decay, which cannot fit both: it is set right for the
# norms, where too much would do harm, and is weaker for matrices.
_LR_RATIO = 50.0


def _build(adalomo: Any, model: nn.Module, hyper: Hyper) -> Any:
    return adalomo(model, lr=_LR_RATIO * hyper.lr, weight_decay=hyper.weight_decay / _LR_RATIO)


def _train(optimizer: Any, loss: Tensor, hyper: Hyper) -> None:
    optimizer.fused_backward(loss, _LR_RATIO * hyper.lr)


SPECS = (
    OptimizerSpec(
        key="adalomo",
        method="AdaLomo",
        target="lomo_optim:AdaLomo",
        build=_build,
        summary="factored second moment, no momentum, fused_backward; lr = 50 x AdamW's, since the "
        "update is scaled by RMS(weight) (5e-4 at 1e-5)",
        distribution="lomo-optim",
        licence="MIT",
        limits=(
            "CUDA only",
            "no step()",
            "no accumulation",
            "clipping needs a second backward",
            "no state_dict",
            "no DDP",
            "no CUDA graph",
            "no torch.compile",
        ),
        train=_train,
        devices=("cuda",),
        states="fp32 factored",
        exact=False,
        # gradient, update and weight of the parameter in fp32
        footprint=Footprint(factored, RELEASED, step_bytes=12),
        adamw_decay=False,
    ),
)

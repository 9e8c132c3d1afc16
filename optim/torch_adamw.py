"""PyTorch's own AdamW: the for-loop, foreach and fused implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from forge.optim.footprint import Footprint, same_dtype
from forge.optim.spec import Hyper, OptimizerSpec


def _build(fused: bool, foreach: bool):
    def build(adamw: Any, model: nn.Module, hyper: Hyper) -> Any:
        options = hyper.adamw
        if hyper.capturable:
            device = next(model.parameters()).device
            options["lr"] = torch.tensor(hyper.lr, device=device)
            options["capturable"] = True
        return adamw(model.parameters(), **options, fused=fused, foreach=foreach)

    return build


SPECS = (
    OptimizerSpec(
        key="adamw",
        method="vanilla AdamW",
        target="torch.optim:AdamW",
        build=_build(fused=False, foreach=False),
        summary="torch.optim.AdamW(foreach=False, fused=False): one parameter at a time",
        # sqrt(v), and its quotient by the bias correction
        footprint=Footprint(same_dtype(2), step_bytes=4),
    ),
    OptimizerSpec(
        key="adamw-foreach",
        method="vanilla AdamW (foreach)",
        target="torch.optim:AdamW",
        build=_build(fused=False, foreach=True),
        summary="torch.optim.AdamW(foreach=True): PyTorch's default on CUDA",
        # sqrt(v) of every parameter at once
        footprint=Footprint(same_dtype(2), step_bytes_all=2),
    ),
    OptimizerSpec(
        key="adamw-fused",
        method="fused AdamW",
        target="torch.optim:AdamW",
        build=_build(fused=True, foreach=False),
        summary="torch.optim.AdamW(fused=True)",
        capturable=True,
        footprint=Footprint(same_dtype(2)),
    ),
)

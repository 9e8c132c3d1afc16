"""Muon on the hidden matrices, fused AdamW on the rest: both from PyTorch."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import AdamW

from forge.optim.footprint import Footprint
from forge.optim.groups import split_hidden_linears
from forge.optim.spec import Hyper, OptimizerSpec


def _state(dims: tuple[int, ...], hidden: bool, itemsize: int) -> float:
    return (1 if hidden else 2) * itemsize * math.prod(dims)


class MuonWithAdamW:
    """``muon`` for attention and MLP matrices, ``adamw`` (fused) for every other parameter."""

    def __init__(self, muon_class: Any, model: nn.Module, hyper: Hyper) -> None:
        hidden, others = split_hidden_linears(model)
        self.muon = muon_class(
            hidden,
            lr=hyper.lr,
            weight_decay=hyper.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = AdamW(others, **hyper.adamw, fused=True)

    def step(self) -> None:
        """Update every parameter from its ``.grad``."""
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) every gradient."""
        self.muon.zero_grad(set_to_none=set_to_none)
        self.adamw.zero_grad(set_to_none=set_to_none)


SPECS = (
    OptimizerSpec(
        key="muon",
        method="Muon + AdamW",
        target="torch.optim:Muon",
        build=MuonWithAdamW,
        summary="torch.optim.Muon(adjust_lr_fn='match_rms_adamw') on attention and MLP matrices; "
        "torch.optim.AdamW(fused=True) for the rest",
        limits=("no CUDA graph",),
        exact=False,
        footprint=Footprint(_state),
    ),
)

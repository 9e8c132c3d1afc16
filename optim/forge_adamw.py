"""This project's AdamW: the update inside backward, weight gradients never stored."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.optim.footprint import FUSED, Footprint, per_element
from forge.optim.spec import Hyper, OptimizerSpec


def _build(states: str):
    def build(forge_adamw: Any, model: nn.Module, hyper: Hyper) -> Any:
        return forge_adamw(model, **hyper.adamw, states=states)

    return build


_LIMITS = (
    "one backward a step (no accumulation over micro-batches)",
    "no global-norm clipping",
    "one process",
)

SPECS = tuple(
    OptimizerSpec(
        key=f"forge-{states}",
        method="FORGE",
        target="forge:ForgeAdamW",
        build=_build(states),
        summary=f"ForgeAdamW(model, states={states!r}), stochastic rounding of what is not fp32",
        licence="Apache-2.0",
        states=states,
        exact=states != "int8",
        limits=_LIMITS,
        capturable=True,
        footprint=Footprint(per_element(size), FUSED, queued_bytes=2**27),
    )
    for states, size in (("bf16", 4), ("fp32", 8), ("int8", 2 + 2 / 128))
)

"""FlashOptim: 8-bit companded states and bf16 weights with error-correction bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.optim.footprint import RELEASED, Footprint, per_element
from forge.optim.spec import Hyper, OptimizerSpec, backward_only


def _build(flashoptim: Any, model: nn.Module, hyper: Hyper) -> Any:
    return flashoptim.FlashAdamW(model.parameters(), **hyper.adamw, master_weight_bits=24)


def _build_release(flashoptim: Any, model: nn.Module, hyper: Hyper) -> Any:
    optimizer = _build(flashoptim, model, hyper)
    flashoptim.enable_gradient_release(model, optimizer)
    return optimizer


_COMMON: dict[str, Any] = dict(
    target="flashoptim",
    distribution="flashoptim",
    licence="Apache-2.0",
    devices=("cuda",),
    states="int8",
    exact=False,
)
# m, v and the weight's correction, a byte each, and an fp16 scale of m and of v per 32 elements.
_STATE = per_element(3 + 2 * 2 / 32)
_SUMMARY = "FlashAdamW(master_weight_bits=24): int8 states, bf16 weight plus 8 correction bits"
_LIMITS = ("CUDA only", "no CUDA graph", "no torch.compile", "bf16 or fp16 weights")

SPECS = (
    OptimizerSpec(
        key="flashoptim",
        method="FlashOptim",
        build=_build,
        summary=_SUMMARY,
        limits=_LIMITS,
        footprint=Footprint(_STATE),
        **_COMMON,
    ),
    OptimizerSpec(
        key="flashoptim-release",
        method="FlashOptim (gradient release)",
        build=_build_release,
        summary=f"{_SUMMARY}; each parameter steps, and frees its gradient, in backward",
        limits=(*_LIMITS, "no accumulation", "no clipping", "no GradScaler", "no DDP"),
        train=backward_only,
        footprint=Footprint(_STATE, RELEASED),
        **_COMMON,
    ),
)

"""optimi: AdamW that steps each parameter, and frees its gradient, in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from forge.optim.footprint import RELEASED, Footprint, same_dtype
from forge.optim.spec import Hyper, OptimizerSpec, backward_only


def _build(kahan_sum: bool | None) -> Callable[[Any, nn.Module, Hyper], Any]:
    def build(optimi: Any, model: nn.Module, hyper: Hyper) -> Any:
        # Gradient release never picks the Triton kernel by itself: without triton=True it would
        # run the eager loop, one parameter at a time.
        on_cuda = next(model.parameters()).device.type == "cuda"
        optimizer = optimi.AdamW(
            model.parameters(),
            **hyper.adamw,
            kahan_sum=kahan_sum,
            triton=on_cuda,
            gradient_release=True,
        )
        optimi.prepare_for_gradient_release(model, optimizer)
        return optimizer

    return build


def _spec(key: str, method: str, kahan_sum: bool | None, note: str) -> OptimizerSpec:
    return OptimizerSpec(
        key=key,
        method=method,
        target="optimi",
        build=_build(kahan_sum),
        summary=f"optimi.AdamW(gradient_release=True), Triton kernel on CUDA; {note}",
        distribution="torch-optimi",
        licence="MIT",
        limits=(
            "no accumulation",
            "no clipping",
            "no GradScaler",
            "no DDP",
            "no CUDA graph",
            "no torch.compile",
        ),
        train=backward_only,
        footprint=Footprint(same_dtype(2 if kahan_sum is False else 3), RELEASED),
    )


SPECS = (
    _spec(
        "optimi-release",
        "optimi.gradient_release",
        kahan_sum=None,
        note="the library's default: a Kahan compensation for every bf16 weight",
    ),
    _spec(
        "optimi-release-nokahan",
        "optimi.gradient_release (no Kahan)",
        kahan_sum=False,
        note="kahan_sum=False",
    ),
)

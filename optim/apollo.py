"""APOLLO: gradients rescaled by the AdamW step of their random low-rank projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from forge.optim.footprint import Footprint, low_rank
from forge.optim.groups import split_hidden_linears
from forge.optim.spec import Hyper, OptimizerSpec


def _build(rank: int) -> Callable[[Any, nn.Module, Hyper], Any]:
    def build(apollo_adamw: Any, model: nn.Module, hyper: Hyper) -> Any:
        hidden, others = split_hidden_linears(model)
        low_rank = dict(
            rank=rank,
            proj="random",
            scale_type="tensor",
            scale=128,
            update_proj_gap=200,
            proj_type="std",
        )
        return apollo_adamw([{"params": others}, {"params": hidden, **low_rank}], **hyper.adamw)

    return build


def _spec(rank: int, note: str) -> OptimizerSpec:
    return OptimizerSpec(
        key=f"apollo-mini-r{rank}",
        method=f"APOLLO-Mini r={rank}",
        target="apollo_torch:APOLLOAdamW",
        build=_build(rank),
        summary=f"APOLLOAdamW on attention and MLP matrices: rank {rank}, scale_type tensor, "
        f"scale 128, random projection redrawn every 200 steps ({note}); AdamW for the rest",
        distribution="apollo-torch",
        licence="CC-BY-NC-4.0",
        limits=(
            "non-commercial licence",
            "no CUDA graph",
            "no torch.compile",
            "no FSDP",
            "checkpoint holds Python objects",
            "synchronizes per matrix",
        ),
        exact=False,
        # sqrt(v), and m over it
        footprint=Footprint(low_rank(rank), step_bytes=4),
    )


SPECS = (
    _spec(256, note="APOLLO's rank with Mini's tensor-wise scaling"),
    _spec(1, note="APOLLO-Mini as its authors define it"),
)

"""GaLore: AdamW in the top singular subspace of each gradient matrix."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.optim.footprint import Footprint, low_rank
from forge.optim.groups import split_hidden_linears
from forge.optim.spec import Hyper, OptimizerSpec


def _build(galore_adamw: Any, model: nn.Module, hyper: Hyper) -> Any:
    hidden, others = split_hidden_linears(model)
    low_rank = dict(rank=128, update_proj_gap=200, scale=0.25, proj_type="std")
    groups = [{"params": others}, {"params": hidden, **low_rank}]
    return galore_adamw(groups, **hyper.adamw, no_deprecation_warning=True)


SPECS = (
    OptimizerSpec(
        key="galore-r128",
        method="GaLore r=128",
        # Not the 8-bit class: with bitsandbytes>=0.50 its positional arguments land elsewhere and
        # small projected matrices never move.
        target="galore_torch:GaLoreAdamW",
        build=_build,
        summary="GaLoreAdamW on attention and MLP matrices: rank 128, scale 0.25, a new projection "
        "(fp32 SVD) every 200 steps; AdamW for the rest",
        distribution="galore-torch",
        licence="Apache-2.0",
        limits=(
            "no CUDA graph",
            "no torch.compile",
            "no FSDP",
            "checkpoint holds Python objects",
            "an SVD per matrix every 200 steps",
        ),
        exact=False,
        # sqrt(v), and m over it
        footprint=Footprint(low_rank(128), step_bytes=4),
    ),
)

"""bitsandbytes: AdamW with block-wise 8-bit states."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.optim.footprint import Footprint, blockwise_8bit
from forge.optim.spec import Hyper, OptimizerSpec


def _build(adamw8bit: Any, model: nn.Module, hyper: Hyper) -> Any:
    optimizer = adamw8bit(model.parameters(), **hyper.adamw)
    # Releases have moved positional arguments: a non-zero max_unorm or skip_zeros silently
    # freezes small tensors, so the row refuses to run on such a configuration.
    args = optimizer.args
    if args.optim_bits != 8 or args.max_unorm != 0.0 or args.skip_zeros:
        raise RuntimeError(
            f"bitsandbytes AdamW8bit has optim_bits={args.optim_bits}, max_unorm={args.max_unorm}, "
            f"skip_zeros={args.skip_zeros}; expected 8, 0.0, False: install bitsandbytes>=0.50"
        )
    return optimizer


SPECS = (
    OptimizerSpec(
        key="bnb-adamw8bit",
        method="bnb 8-bit AdamW",
        target="bitsandbytes.optim:AdamW8bit",
        build=_build,
        summary="m and v as 8-bit dynamic codes, one fp32 scale per 256 values; the embedding too "
        "(tensors under 4096 elements stay fp32)",
        distribution="bitsandbytes",
        licence="MIT",
        limits=("no CUDA graph", "no torch.compile", "no FSDP2", "synchronizes per parameter"),
        states="int8",
        footprint=Footprint(blockwise_8bit(small=lambda itemsize: 8)),
        exact=False,
    ),
)

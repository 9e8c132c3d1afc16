"""torchao: AdamW with block-wise 8-bit states, one compiled kernel per shape."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.optim.footprint import Footprint, blockwise_8bit
from forge.optim.spec import Hyper, OptimizerSpec


def _build(adamw8bit: Any, model: nn.Module, hyper: Hyper) -> Any:
    return adamw8bit(model.parameters(), **hyper.adamw)


SPECS = (
    OptimizerSpec(
        key="torchao-adamw8bit",
        method="torchao 8-bit AdamW",
        target="torchao.optim:AdamW8bit",
        build=_build,
        summary="AdamW8bit: m and v as 8-bit codes, one fp32 scale per 256 values, nearest "
        "rounding (tensors under 4096 elements keep the weight's dtype)",
        distribution="torchao",
        licence="BSD-3-Clause",
        limits=("needs a C compiler (torch.compile)", "no CUDA graph", "no FSDP1"),
        states="int8",
        # m and v of the parameter in fp32, between the kernels that decode and encode them
        footprint=Footprint(blockwise_8bit(small=lambda itemsize: 2 * itemsize), step_bytes=8),
        exact=False,
    ),
)
